"""Speaking to an object store: clients that give up in time, and errors that say in one line what to check."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from cache_store.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

Client: TypeAlias = "AnyStore"

SCHEMES = ("s3", "gs", "az")

CONNECT_S, ANSWER_S, RETRIED_S = 5, 20, 40
"""For a connection; for the whole answer to a small request; after which no request is tried again. So an endpoint that
is dead is an error within a minute."""

SLOWEST_BYTES_A_S = 1 << 20
"""An upload that is slower than this is tried again, and then an error."""

MAX_RETRIES = 10

ATTEMPTS = 4
"""For an answer that was cut short, and for a name that others contend for."""

IN_FLIGHT = 32
"""Requests of one process at the same time: each waits some 20 ms for its first byte."""

MISSING_EXTRA = (
    "object stores need obstore, which is not installed; run `pip install '.[object-stores]'` in a clone of encode-once"
)

FORKED = (
    "this process was forked from one that had used the object store, and obstore's threads do not survive that: "
    'start it by "spawn" or "forkserver" (of a DataLoader, multiprocessing_context="spawn")'
)

FIRST_USE: list[int] = []
"""The process that made the first client."""

ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}

REGION = {"s3": "AWS_REGION (and AWS_ENDPOINT_URL)", "gs": "the bucket's location", "az": "the account's name"}

CODE = re.compile(r"<Code>(\w+)</Code>")
STATUS = re.compile(r"status code: (\d{3} [A-Z][A-Za-z -]*)")
METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal", "no credentials")


def timeout_s(num_bytes: int) -> int:
    """For a request that carries so many bytes, by steps, so that few clients are made."""
    seconds = ANSWER_S
    while seconds * SLOWEST_BYTES_A_S < num_bytes:
        seconds *= 4
    return seconds


def client(url: str, num_bytes: int = 0) -> Client:
    """To be asked at each use, within `telling`; `num_bytes` are those that it is to carry.

    ConfigError where the URL or the environment make no sense to obstore.
    """
    if FIRST_USE and FIRST_USE[0] != os.getpid():
        raise RuntimeError(FORKED)
    return make_client(url, timeout_s(num_bytes))


@lru_cache(maxsize=64)
def make_client(url: str, seconds: int) -> Client:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    FIRST_USE.append(os.getpid())
    scheme = url.partition("://")[0]
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
        return connect(url, client_options=options, retry_config=retries, **config)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {first_line(error)}") from None


@lru_cache(maxsize=1)
def pool() -> ThreadPoolExecutor:
    """Threads that wait for answers."""
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")


@contextmanager
def telling(where: str) -> Iterator[None]:
    """What the store refuses, as an OSError that names the address and what to check."""
    try:
        from obstore.exceptions import BaseError
    except ImportError:
        raise ConfigError(MISSING_EXTRA) from None
    try:
        yield
    except FileNotFoundError as error:
        if (code := code_of(error)) not in (None, "NoSuchKey", "BlobNotFound"):
            raise refusal(error, where, code) from None
        raise missing(where) from None
    except BaseError as error:
        raise refusal(error, where, code_of(error)) from None


def missing(where: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)


def cut_short(where: str) -> OSError:
    return OSError(errno.EIO, "answers are cut short, also when asked again", where)


def was_answered_or_retried(error: Exception) -> bool:
    """Whether there is no point in trying again what failed."""
    return STATUS.search(str(error)) is not None or " retries, " in str(error)


def code_of(error: Exception) -> str | None:
    """What S3, GCS and Azure call the matter in the body of an answer."""
    found = CODE.search(str(error))
    return found and found[1]


def refusal(error: Exception, where: str, code: str | None) -> OSError:
    """Say what a person can check."""
    text, scheme = str(error), where.partition("://")[0]
    bucket = where.partition("://")[2].partition("/")[0]
    if code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"):
        return OSError(errno.ENXIO, f"there is no bucket {bucket!r}: check its name, {REGION[scheme]}", where)
    if any(name in text for name in METADATA_SERVICES):
        return PermissionError(errno.EACCES, f"no credentials were found: set {CREDENTIALS[scheme]}", where)
    if code in ("ExpiredToken", "TokenRefreshRequired", "RequestExpired"):
        return PermissionError(errno.EACCES, f"the token has expired ({code}): renew {CREDENTIALS[scheme]}", where)
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or "redirect" in text:
        return OSError(errno.EIO, f"the bucket lies in another region: set {REGION[scheme]}", where)
    if "builder error" in text:
        return OSError(errno.EIO, f"an endpoint of plain HTTP is spoken to only with {ALLOW_HTTP[scheme]}=true", where)
    status = STATUS.search(text)
    said = " ".join(filter(None, (status and status[1].strip(), code)))
    if code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch") or said.startswith(("401", "403")):
        why = f"the store refuses these credentials ({said}): check {CREDENTIALS[scheme]} and the bucket's policy"
        return PermissionError(errno.EACCES, why, where)
    if said == "400 Bad Request":  # to a HEAD, whose answer has no code
        why = f"the store answers {said}, as where a token has expired: check {CREDENTIALS[scheme]}"
        return PermissionError(errno.EACCES, why, where)
    if status:
        return OSError(errno.EIO, f"the store answers {said}, also when asked again: {first_line(error)}", where)
    return OSError(errno.EIO, f"no whole answer: check the network and the endpoint ({first_line(error)})", where)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
