"""Stores without files to open, map or lock: what follows from the eight verbs; and stores that wrap a store."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from cache_store.storage.ahead import AheadReader, NeighbourParts
from cache_store.storage.callers import in_flight
from cache_store.storage.files import MAX_READ_BYTES, SCRATCH_SUFFIX, naming_scratch
from cache_store.storage.local import WRITE_BYTES, map_file
from cache_store.storage.verbs import Data, File, Ranges, Store, Version

PART_BYTES = 8 << 20
"""Larger parts of a file are fetched as several, at the same time."""

COPIED_BYTES = 16 << 20
"""At a time, to a file of this machine."""


class RemoteStore(Store):
    """A store of files that are read by ranges and written whole.

    A draft is a file in local scratch (TMPDIR) until it is published. There are no locks: `claim` keeps nobody out, and
    the first that gives a file its name wins (`put_if_absent`), which the store decides.
    """

    def open(self, name: str, version: Version | None = None) -> File:
        return FetchedFile(self, name, version or self.stat(name))

    def map(self, name: str) -> memoryview:
        with self.open(name) as stream, scratch() as path:
            with naming_scratch(), path.open("wb") as copy:
                shutil.copyfileobj(stream, copy, COPIED_BYTES)
            return map_file(path)

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator["ScratchDraft"]:
        with scratch() as path, naming_scratch(), path.open("wb", buffering=WRITE_BYTES) as stream:
            yield ScratchDraft(self, name, path, stream)


@dataclass(frozen=True)
class WrappedStore(RemoteStore):
    """A store that asks another for everything; each kind asks it for something in a way of its own."""

    inner: Store

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    @property
    def keeps_others_out(self) -> bool:
        return self.inner.keeps_others_out

    @property
    def is_read_only(self) -> bool:
        return self.inner.is_read_only

    def __str__(self) -> str:
        return str(self.inner)

    def where(self, name: str) -> str:
        return self.inner.where(name)

    def stat(self, name: str) -> Version:
        return self.inner.stat(name)

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        return self.inner.read(name, at_most)

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return self.inner.fetch(wanted)

    def list(self, folder: str = "") -> list[str]:
        return self.inner.list(folder)

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return self.inner.walk(after)

    def put_whole(self, name: str, data: Data) -> None:
        self.inner.put_whole(name, data)

    def put_if_absent(self, name: str, data: Data) -> bool:
        return self.inner.put_if_absent(name, data)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


class FetchedFile(File):
    """A file that is read by ranges, of which each is checked to be of the version that was opened."""

    def __init__(self, store: Store, name: str, version: Version) -> None:
        self._store, self._name = store, name
        super().__init__(AheadReader(version.size, self._fetch), store.where(name), version)
        self._neighbours = NeighbourParts(version.size, self._fetch)

    def again(self) -> Self:
        return type(self)(self._store, self._name, self.version)

    def part(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.version.size)
        if stop - start > PART_BYTES:
            spans = [(first, min(first + PART_BYTES, stop)) for first in range(start, stop, PART_BYTES)]
            return b"".join(in_flight(lambda span: self._fetch(*span), spans))
        return bytes(self._neighbours.part(start, stop)) if start < stop else b""

    def refuse_changed(self) -> None:
        """Do nothing: every range was checked as it came."""

    def _fetch(self, start: int, stop: int) -> memoryview:
        return self._store.fetch([Ranges(self._name, [start], [stop - start], version=self.version)])[0][0]


@dataclass(frozen=True)
class ScratchDraft:
    """A scratch file of this machine, put into the store when it is published."""

    store: Store
    name: str
    scratch: Path
    stream: BinaryIO

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        with naming_scratch():
            yield self.stream

    def finish(self) -> None:
        with self.writing() as stream:
            stream.flush()

    def map(self) -> memoryview:
        return map_file(self.scratch)

    def publish(self) -> None:
        self.store.put_whole(self.name, self.map())

    def publish_if_absent(self) -> bool:
        return self.store.put_if_absent(self.name, self.map())


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a private scratch file; where possible it has no name, so that it goes however the process ends."""
    with naming_scratch():
        descriptor, named = tempfile.mkstemp(SCRATCH_SUFFIX, "encode-once-")
    nameless = Path(f"/proc/self/fd/{descriptor}")
    try:
        if nameless.exists():
            Path(named).unlink()
            yield nameless
        else:
            yield Path(named)
    finally:
        os.close(descriptor)
        Path(named).unlink(missing_ok=True)
