"""Object stores (S3, GCS, Azure) through obstore, mostly with one request per verb, each with a time limit."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

from cache_store.errors import ConfigError, TooLargeError
from cache_store.storage.object_errors import ALLOW_HTTP, CREDENTIALS, explain_store_errors, first_line
from cache_store.storage.prefetch import PART_BYTES, Span, read_parts
from cache_store.storage.protocol import (
    MAX_READ_BYTES,
    Data,
    Ranges,
    Version,
    changed_error,
    cut_short_error,
    too_large_error,
)
from cache_store.storage.remote import COPIED_BYTES, UrlStore
from cache_store.storage.retry import TransientError, transient_error
from cache_store.storage.threads import map_concurrently

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

Client: TypeAlias = "AnyStore"

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az")

CONNECT_S, ANSWER_S = 5, 20
"""Most seconds for a connection, and for the answer to a small request."""

SLOWEST_BYTES_A_S = 1 << 20
"""A slower upload is tried again, then reported as an error."""

PAGE = 1_000
"""Names per page of a listing, as in S3."""

MULTIPART_BYTES = 64 << 20
"""Files of at least this size that may replace another are uploaded in parts of COPIED_BYTES."""

PART_RETRIES = 10
"""Most retries of a part by obstore itself; all other requests are repeated by `retry.py`."""

MOST_CREATED_BYTES = 5_000 << 20
"""Largest file for `put_if_absent`: it must be one request, and Azure accepts no more, S3 little more."""

S3_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
ENDPOINTS = (*S3_ENDPOINTS, "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION", *S3_ENDPOINTS)
"""One of these must be set for S3: obstore would assume us-east-1, and its error would suggest a wrong bucket."""

NO_REGION = "no region is set: set AWS_REGION to the bucket's, or AWS_ENDPOINT_URL where the store is not Amazon's"

FORKED = (
    "this process was forked from one that had read an object store, whose threads do not survive that; "
    'give the DataLoader multiprocessing_context="spawn"'
)


class ObjectStore(UrlStore):
    """A `Store` below a URL; each process connects at first use."""

    def stat(self, name: str) -> Version:
        return self._request(name, lambda: self._stat(name))

    def _stat(self, name: str) -> Version:
        return version_of_meta(client(self.url).head(name))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        return self._request(name, lambda: self._read(name, at_most))

    def _read(self, name: str, at_most: int) -> bytes:
        """Read a small file in one request, a large one in two."""
        try:
            with explain_store_errors(self.where(name)):
                data, version = self._range(name, 0, PART_BYTES, at_most)
        except OSError as error:
            if error.errno != errno.ENODATA or isinstance(error, TransientError) or self._stat(name).size:
                raise
            return b""  # an empty file has no range
        if len(data) == version.size:
            return bytes(data)
        rest, again = self._range(name, len(data), version.size - len(data))
        if again != version:
            raise transient_error(cut_short_error(self.where(name)))
        return b"".join((data, rest))

    def _fetch_file(self, wanted: Ranges) -> Sequence[memoryview]:
        return self._request(wanted.name, lambda: self._ranges(wanted))

    def _ranges(self, wanted: Ranges) -> Sequence[memoryview]:
        spans = [(start, start + length) for start, length in zip(wanted.starts, wanted.lengths, strict=True)]
        fetch = partial(self._spans, wanted.name)
        return read_parts(spans, fetch if wanted.version is None else partial(self._spans_of, wanted))

    def _spans_of(self, wanted: Ranges, spans: Sequence[Span]) -> Sequence[memoryview]:
        parts = map_concurrently(lambda span: self._range(wanted.name, span[0], span[1] - span[0]), spans)
        if any(version != wanted.version for _, version in parts):
            raise changed_error(self.where(wanted.name))
        return [data for data, _ in parts]

    def _spans(self, name: str, spans: Sequence[Span]) -> Sequence[Any]:
        """Fetch spans of a file, ten at a time; obstore must not merge them: it aborts if an answer is cut short."""
        starts, lengths = [first for first, _ in spans], [end - first for first, end in spans]
        found = client(self.url).get_ranges(name, starts=starts, lengths=lengths, coalesce=0)
        if [*map(len, found)] != lengths:
            raise transient_error(cut_short_error(self.where(name)))
        return found

    def _range(self, name: str, start: int, length: int, at_most: int | None = None) -> tuple[memoryview, Version]:
        """Return `length` bytes, or fewer at the file's end, and the file's version."""
        answer = client(self.url, length).get(name, options={"range": (start, start + length)})
        version = version_of_meta(answer.meta)
        if at_most is not None and version.size > at_most:
            raise too_large_error(self.where(name), version.size, at_most)
        data = memoryview(answer.bytes())
        if len(data) != min(length, version.size - start):  # `size` is from Content-Range: Content-Length may be cut
            raise transient_error(cut_short_error(self.where(name)))
        return data, version

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{folder}/" if folder else ""
        found = self._request(prefix, lambda: client(self.url).list_with_delimiter(folder or None))
        names = [each["path"] for each in found["objects"]]
        folders = [f"{path}/" for path in found["common_prefixes"]]
        return sorted(name.removeprefix(prefix) for name in (*names, *folders) if name not in ("", folder))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield every file; a listing that broke off continues at the same place."""
        listing: Iterator[Sequence[Mapping[str, Any]]] | None = None

        def page() -> Sequence[Mapping[str, Any]]:
            nonlocal listing
            pages = listing or iter(client(self.url).list(offset=after or None, chunk_size=PAGE))
            listing = None  # one that has failed cannot continue
            found = next(pages, ())
            listing = pages
            return found

        while found := self._request("", page):
            yield from ((each["path"], version_of_meta(each)) for each in found if each["path"] > after)
            after = max(after, found[-1]["path"])  # Azure ignores the offset

    def put_whole(self, name: str, data: Data) -> None:
        self._request(name, lambda: self._put(name, data))

    def _put(self, name: str, data: Data) -> None:
        if len(data) < MULTIPART_BYTES:
            client(self.url, len(data)).put(name, data, use_multipart=False)
        else:
            client(self.url, COPIED_BYTES, PART_RETRIES).put(name, data, use_multipart=True, chunk_size=COPIED_BYTES)

    def put_if_absent(self, name: str, data: Data) -> bool:
        if len(data) > MOST_CREATED_BYTES:
            limit = f"{len(data):,} bytes exceed an object store's limit per request; lower samples_per_shard"
            raise OSError(errno.EFBIG, limit, self.where(name))
        return self._request(name, lambda: self._create(name, data))

    def _create(self, name: str, data: Data) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            client(self.url, len(data)).put(name, data, mode="create", use_multipart=False)
            return True
        except AlreadyExistsError:
            pass
        try:
            return self._read(name, len(data)) == data  # our own put, made twice, may have written it
        except TooLargeError:
            return False
        except FileNotFoundError:  # S3's 409: another put of this name is in progress
            problem = "other programs are writing it, but it does not appear"
            raise transient_error(
                OSError(errno.EAGAIN, problem, self.where(name)), "409 Conflict", is_away=True
            ) from None

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):  # GCS and Azure report a missing file, S3 does not
            self._request(name, lambda: client(self.url).delete(name))

    def _request(self, name: str, request: Callable[[], T]) -> T:
        return self._ask(explain_store_errors(self.where(name))(request))


def version_of_meta(meta: Mapping[str, Any]) -> Version:
    mark = meta["e_tag"] or meta["last_modified"].isoformat()
    return Version(meta["size"], mark.strip('"'))


def timeout_s(num_bytes: int) -> int:
    """Return the time limit of a request, in steps, so that few clients are made."""
    seconds = ANSWER_S
    while seconds * SLOWEST_BYTES_A_S < num_bytes:
        seconds *= 4
    return seconds


def client(url: str, num_bytes: int = 0, retries: int = 0) -> Client:
    """Return a client for requests of up to `num_bytes`; do not keep it, since a fork makes it unusable."""
    if connected_process() != os.getpid():
        raise ConfigError(f"{url}: {FORKED}")
    return make_client(url, timeout_s(num_bytes), retries)


@lru_cache(maxsize=1)
def connected_process() -> int:
    # Also in forked children of the process that asked for the first client.
    return os.getpid()


@lru_cache(maxsize=64)
def make_client(url: str, seconds: int, retries: int) -> Client:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme, _, place = url.partition("://")
    if scheme == "s3" and not any(os.environ.get(name) for name in REGIONS):
        raise ConfigError(f"{url}: {NO_REGION}")
    refuse_invalid_endpoint()
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=seconds),
        "allow_http": os.environ.get(ALLOW_HTTP[scheme], "").lower() in ("1", "true"),
    }
    config: dict[str, Any] = {}
    if scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
        config["checksum_algorithm"] = "SHA256"  # the server compares it with the bytes that it received
    connect: Callable[..., Client] = from_url  # its options are typed per scheme
    try:
        literal = f"{scheme}://{quote(place, safe='/@:')}"  # `#`, `?` and `%20` are plain characters of a name
        return connect(literal, client_options=options, retry_config={"max_retries": retries}, **config)
    except (BaseError, ValueError) as error:
        problem = first_line(error).rpartition(" error: ")[2]
        raise ConfigError(f"{url}: {problem}: check {CREDENTIALS[scheme]}") from None


def refuse_invalid_endpoint() -> None:
    # obstore would panic.
    for name in ENDPOINTS:
        value = os.environ.get(name)
        if value is not None and re.fullmatch(r"https?://[^/\s].*", value) is None:
            raise ConfigError(f"{name} is {value!r}; an endpoint is https://HOST or http://HOST:PORT, else unset it")
