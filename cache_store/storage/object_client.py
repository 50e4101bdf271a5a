"""Speaking to an object store: clients that give up in time, and what is asked again, with pauses where it is busy."""

import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

from cache_store.errors import ConfigError
from cache_store.storage.object_errors import (
    ALLOW_HTTP,
    CutShortError,
    cut_short,
    first_line,
    is_busy,
    is_cut,
    refusal,
    said_by,
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

BUSY_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 1.0, 10.0
"""How long in all, and at a time, an operation pauses that a store was too busy for, each time for ten requests."""

TOLD_EACH_S = 30.0
"""Between two lines that say so: many operations wait at the same time."""

ATTEMPTS = 4
"""For an answer that was cut short, and for a name that others contend for."""

PAGE = 1_000
"""Names in a listing at a time, as S3 gives them."""

IN_FLIGHT = 128
"""Calls of one process at the same time: each waits some 20 ms for its first byte."""

MISSING_EXTRA = (
    "object stores need obstore, which is not installed; run `pip install '.[object-stores]'` in a clone of encode-once"
)

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", *ENDPOINTS[:3])
"""One of these says where S3 is; obstore would guess us-east-1, and fail with what looks like a wrong bucket."""

NO_REGION = "no region is set: set AWS_REGION to the bucket's, or AWS_ENDPOINT_URL where the store is not Amazon's"

FORKED = (
    "this process was forked from one that had used the object store, and obstore's threads do not survive that: "
    'start it by "spawn" or "forkserver" (of a DataLoader, multiprocessing_context="spawn")'
)

OVER = threading.Event()
"""The program ends: it waits for the threads of `pool`, so none goes on waiting; a public hook comes after that."""
threading._register_atexit(OVER.set)  # type: ignore[attr-defined]

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
    if FIRST_USE and FIRST_USE[0] != os.getpid():
        raise RuntimeError(FORKED)
    return make_client(url, timeout_s(num_bytes))


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
        raise ConfigError(f"{url}: {first_line(error)}") from None


def refuse_senseless_endpoint() -> None:
    """ConfigError in place of the panic in which obstore ends."""
    for name in ENDPOINTS:
        value = os.environ.get(name)
        if value is not None and re.fullmatch(r"https?://[^/\s].*", value) is None:
            raise ConfigError(f"{name} is {value!r}; an endpoint is https://HOST or http://HOST:PORT, else unset it")


def ask(where: str, call: Callable[[], T]) -> T:
    """What a call of a client gives, asked again where a store is too busy, or, a few times, where answers are cut.

    It may take effect twice. What the store refuses is an OSError that names the address and what to check.
    """
    try:
        from obstore.exceptions import BaseError, GenericError
    except ImportError:
        raise ConfigError(MISSING_EXTRA) from None
    left_s, cuts = pauses(), count(1)
    while True:
        try:
            return call()
        except CutShortError:
            if next(cuts) == ATTEMPTS:
                raise cut_short(where) from None
        except (FileNotFoundError, BaseError) as error:
            if is_busy(error) and (pause_s := next(left_s, 0.0)):
                tell_of_waiting(where, error)
                if OVER.wait(pause_s):
                    raise refusal(error, where) from None
            elif not (isinstance(error, GenericError) and is_cut(error)) or next(cuts) == ATTEMPTS:
                raise refusal(error, where) from None


def pauses() -> Iterator[float]:
    """Growing, and of chance, so that those who were refused together do not come back together."""
    left_s, pause_s = BUSY_S, FIRST_PAUSE_S
    while left_s > 0:
        taken_s = min(left_s, pause_s * CHANCE.uniform(0.5, 1.5))
        yield taken_s
        left_s, pause_s = left_s - taken_s, min(2 * pause_s, LONGEST_PAUSE_S)


CHANCE = random.Random()
"""Not the one that a training run may have seeded."""


class Told:
    """When a person was last told that the store is busy."""

    lock = threading.Lock()
    at_s = -TOLD_EACH_S


def tell_of_waiting(where: str, error: Exception) -> None:
    with Told.lock:
        if time.monotonic() - Told.at_s < TOLD_EACH_S:
            return
        Told.at_s = time.monotonic()
    print(f"the store answers {said_by(error)}: waiting, for up to {BUSY_S:.0f} s: {where}", file=sys.stderr)


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


def pool() -> ThreadPoolExecutor:
    """Threads of this process that wait for answers."""
    return make_pool(os.getpid())


@lru_cache(maxsize=1)
def make_pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")
