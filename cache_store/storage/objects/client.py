"""Speaking to an object store: clients that give up in time, and what is asked again, with pauses where it is busy."""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

from cache_store.errors import ConfigError, install
from cache_store.log import log_warning
from cache_store.storage.objects.callers import GRACE_S, Callers
from cache_store.storage.objects.errors import (
    ALLOW_HTTP,
    CREDENTIALS,
    PASSING,
    CutShortError,
    code_of,
    cut_short,
    first_line,
    has_status,
    is_busy,
    refusal,
    said_by,
    was_retried,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as AnyStore

Client: TypeAlias = "AnyStore"

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az")

CONNECT_S, ANSWER_S, RETRIED_S = 5, 20, 40
"""For a connection; for the whole answer to a small request; after which no request is tried again. So an endpoint that
is dead is an error within a minute."""

SLOWEST_BYTES_A_S = 1 << 20
"""An upload that is slower than this is tried again, and then an error."""

MAX_RETRIES = 10
"""By obstore, which are over in 2 to 8 s where the store answers at once that it is busy."""

BUSY_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 90.0, 1.0, 10.0
"""How long a store may stay too busy for an operation, or silent, by the clock; how long it pauses, after each ten
requests.
"""

TOLD_EACH_S = 30.0
"""Between two lines that say so: many operations wait at the same time."""

ATTEMPTS = 4
"""For an answer that was cut short, and for a name that others contend for."""

PAGE = 1_000
"""Names in a listing at a time, as S3 gives them."""

IN_FLIGHT = 128
"""Calls of one process at the same time: each waits some 20 ms for its first byte."""

MISSING_EXTRA = f"object stores need obstore, which is not installed; run {install('object-stores')}"

S3_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
ENDPOINTS = (*S3_ENDPOINTS, "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", *S3_ENDPOINTS)
"""One of these says where S3 is; obstore would guess us-east-1, and fail with what looks like a wrong bucket."""

NO_REGION = "no region is set: set AWS_REGION to the bucket's, or AWS_ENDPOINT_URL where the store is not Amazon's"

FORKED = (
    "this process was forked from one that had used the object store, and obstore's threads do not survive that: "
    'start it by "spawn" or "forkserver" (of a DataLoader, multiprocessing_context="spawn")'
)

HEARD: set[str] = set()
"""Buckets that have answered this process: a store that falls silent then is waited for, as a busy one is."""

FIRST_USE: list[int] = []
"""The process that made the first client."""


def timeout_s(num_bytes: int) -> int:
    """For a request that carries so many bytes, by steps, so that few clients are made."""
    seconds = ANSWER_S
    while seconds * SLOWEST_BYTES_A_S < num_bytes:
        seconds *= 4
    return seconds


def client(url: str, num_bytes: int = 0) -> Client:
    """To be called at each use, within `ask`; `num_bytes` are those that it is to carry.

    ConfigError where the URL or the environment make no sense to obstore, or no region is set.
    """
    if is_forked():
        raise RuntimeError(FORKED)
    return make_client(url, timeout_s(num_bytes))


def is_forked() -> bool:
    """Whether this process was forked from one that has made a client."""
    return bool(FIRST_USE) and FIRST_USE[0] != os.getpid()


@lru_cache(maxsize=64)
def make_client(url: str, seconds: int) -> Client:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme, _, place = url.partition("://")
    if scheme == "s3" and not any(os.environ.get(name) for name in REGIONS):
        raise ConfigError(f"{url}: {NO_REGION}")
    refuse_senseless_endpoint()
    FIRST_USE.append(os.getpid())
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=seconds),
        "allow_http": os.environ.get(ALLOW_HTTP[scheme], "").lower() in ("1", "true"),
    }
    config: dict[str, Any] = {}
    if scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
        config["checksum_algorithm"] = "SHA256"  # which the server compares with what came
    retries = {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRIED_S)}
    connect: Callable[..., Client] = from_url  # whose options have a type for each scheme
    try:
        literal = f"{scheme}://{quote(place, safe='/@:')}"  # a `#`, `?` or `%20` of a name is one of its letters
        return connect(literal, client_options=options, retry_config=retries, **config)
    except (BaseError, ValueError) as error:
        problem = first_line(error).rpartition(" error: ")[2]
        raise ConfigError(f"{url}: {problem}: check {CREDENTIALS[scheme]}") from None


def refuse_senseless_endpoint() -> None:
    """ConfigError in place of the panic in which obstore ends."""
    for name in ENDPOINTS:
        value = os.environ.get(name)
        if value is not None and re.fullmatch(r"https?://[^/\s].*", value) is None:
            raise ConfigError(f"{name} is {value!r}; an endpoint is https://HOST or http://HOST:PORT, else unset it")


def ask(where: str, call: Callable[[], T], grace_s: float = GRACE_S) -> T:
    """What a call of a client gives, asked again where a store is too busy, or, a few times, where answers are cut.

    It may take effect twice. What the store refuses is an OSError that names the address and what to check. It is made
    in a thread of `pool`: a signal is heard while this one waits.
    """
    return pool().run(lambda: ask_here(where, call), grace_s)


def ask_here(where: str, call: Callable[[], T]) -> T:
    try:
        from obstore import exceptions  # of the package: another thread may not have all of it yet
    except ImportError:
        raise ConfigError(MISSING_EXTRA) from None
    left, cuts, bucket = pauses(), count(1), where.split("/")[2]
    while True:
        try:
            answer = call()
            HEARD.add(bucket)
            return answer
        except CutShortError:
            if next(cuts) == ATTEMPTS:
                raise cut_short(where) from None
        except (FileNotFoundError, exceptions.BaseError) as error:
            if code_of(error) in PASSING and next(cuts) < ATTEMPTS:
                time.sleep(FIRST_PAUSE_S * CHANCE.random())
                continue
            no_answer = isinstance(error, exceptions.GenericError) and not has_status(error)
            if no_answer and not was_retried(error) and next(cuts) < ATTEMPTS:
                continue
            is_away = no_answer and bucket in HEARD
            if not (is_busy(error) or is_away) or (waiting := next(left, None)) is None:
                raise refusal(error, where) from None
            left_s, pause_s = waiting
            tell_of_waiting(where, error, left_s)
            time.sleep(pause_s)


def pauses() -> Iterator[tuple[float, float]]:
    """How long is left, from the first of them on, and each pause: growing, and of chance, so that those who were
    refused together do not come back together.
    """
    until_s, pause_s = time.monotonic() + BUSY_S, FIRST_PAUSE_S
    while (left_s := until_s - time.monotonic()) > 0:
        yield left_s, min(left_s, pause_s * CHANCE.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


CHANCE = random.Random()
"""Not the one that a training run may have seeded."""


class Told:
    """When a person was last told that a store is waited for."""

    lock = threading.Lock()
    at_s = -TOLD_EACH_S


def tell_of_waiting(where: str, error: Exception, left_s: float) -> None:
    with Told.lock:
        if time.monotonic() - Told.at_s < TOLD_EACH_S:
            return
        Told.at_s = time.monotonic()
    said = f"answers {said_by(error)}" if is_busy(error) else "does not answer any more"
    log_warning(f"the store {said}: waiting, for up to {left_s:.0f} s more: {where}")


def all_objects(url: str) -> "Iterator[ObjectMeta]":
    """Everything below a URL, in order; a listing that broke off goes on where it was."""
    last: str | None = None
    pages: Any = None

    def start() -> Any:
        return client(url).list(offset=last, chunk_size=PAGE)

    def following() -> "Sequence[ObjectMeta] | None":
        from obstore.exceptions import BaseError

        nonlocal pages
        try:
            return next(pages, None)
        except BaseError:
            pages = start()  # the old one has ended
            raise

    pages = ask(url, start)
    while page := ask(url, following):
        yield from page
        last = page[-1]["path"]


def pool() -> Callers:
    """Threads of this process that wait for answers."""
    return make_pool(os.getpid())


@lru_cache(maxsize=1)
def make_pool(process: int) -> Callers:
    return Callers(IN_FLIGHT)
