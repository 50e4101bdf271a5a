"""Stores behind a network: their files are read by ranges and written whole."""

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

from cache_store.errors import ConfigError
from cache_store.storage.files import map_file
from cache_store.storage.local import WRITE_BYTES
from cache_store.storage.prefetch import STREAM_BYTES, PartReader, RangeStream
from cache_store.storage.protocol import Draft, File, Ranges, Store, Version
from cache_store.storage.publish import name_scratch_in_errors, scratch_file
from cache_store.storage.retry import repeat
from cache_store.storage.threads import map_concurrently, submit

COPIED_BYTES = 16 << 20
"""Bytes copied to a local file at a time."""

T = TypeVar("T")


class RemoteStore(Store):
    """A store whose files are read by ranges and written whole.

    A draft is a local scratch file (in TMPDIR) until it is published. There are no locks: `claim` does nothing, and the
    store decides which program is the first to give a file its name (`put_if_absent`).
    """

    def open(self, name: str, version: Version | None = None) -> File:
        return FetchedFile(self, name, version or self.stat(name))

    def map(self, name: str) -> memoryview:
        with self.open(name) as stream, scratch_file() as path:
            with name_scratch_in_errors(), path.open("wb") as copy:
                shutil.copyfileobj(stream, copy, COPIED_BYTES)
            return map_file(path)

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator[Draft]:
        with scratch_file() as path, name_scratch_in_errors(), path.open("wb", buffering=WRITE_BYTES) as stream:
            yield Draft(self, name, path, stream)


@dataclass(frozen=True)
class UrlStore(RemoteStore):
    """A store below a URL, which has no slash at its end."""

    url: str

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        if not place.strip("/") or place.startswith("/"):
            raise ConfigError(f"{scheme}://{place} names no bucket; a URL is {scheme}://BUCKET/FOLDER")
        return cls(f"{scheme}://{place.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return map_concurrently(self._fetch_file, wanted)

    @abstractmethod
    def _fetch_file(self, wanted: Ranges) -> Sequence[memoryview]:
        """Return whole byte ranges of one file."""

    def _ask(self, request: Callable[[], T]) -> T:
        """Return the result of a request, repeated in a thread, so that this one reacts to signals."""
        bucket = "/".join(self.url.split("/")[:3])
        return submit(lambda: repeat(bucket, request)).result()


class FetchedFile(File):
    """A file that is read by ranges; each range is checked to come from the version that was opened."""

    def __init__(self, store: Store, name: str, version: Version) -> None:
        self._store, self._name = store, name
        self._parts = PartReader(version.size, self._fetch)
        super().__init__(RangeStream(version.size, self._parts.part), store.where(name), version, STREAM_BYTES)

    def reopen(self) -> Self:
        return type(self)(self._store, self._name, self.version)

    def part(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.version.size)
        return bytes(self._parts.part(start, stop)) if start < stop else b""

    def refuse_changed(self) -> None:
        """Do nothing: every range was checked when it was read."""

    def _fetch(self, start: int, stop: int) -> memoryview:
        return self._store.fetch([Ranges(self._name, [start], [stop - start], version=self.version)])[0][0]
