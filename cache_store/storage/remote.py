"""Stores without files to open, map or lock, stores that wrap a store, and a store as one listing found it."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Self

from cache_store.storage.ahead import AheadReader, NeighbourParts
from cache_store.storage.callers import in_flight
from cache_store.storage.files import MAX_READ_BYTES, SCRATCH_SUFFIX, missing, naming_scratch
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


def listed_once(store: Store) -> Store:
    """Return the store, or for a remote one a view of its names and sizes, listed together, to look at many files."""
    return ListedStore(store) if store.is_remote else store


@dataclass(frozen=True)
class ListedStore(WrappedStore):
    """A store as it was listed at the first look; what is written later is read, but neither listed nor measured."""

    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    found: list[Mapping[str, Version]] = field(default_factory=list, compare=False, repr=False)
    """Filled at the first look."""

    def stat(self, name: str) -> Version:
        if (version := self.versions.get(name)) is None:
            raise missing(self.where(name))
        return version

    def list(self, folder: str = "") -> list[str]:
        return sorted(self.entries.get(folder, ()))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return ((name, version) for name, version in self.versions.items() if name > after)

    @property
    def versions(self) -> Mapping[str, Version]:
        """By name."""
        with self.lock:
            if not self.found:
                self.found.append({name: version for name, version in self.inner.walk() if version is not None})
            return self.found[0]

    @cached_property
    def entries(self) -> Mapping[str, set[str]]:
        """By folder."""
        return entries_by_folder(self.versions)


def entries_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the direct entries of each folder, "" being the top; names of folders end in a slash.

    An object that only marks a folder has the folder's name and is not an entry.
    """
    folders: dict[str, set[str]] = {}
    for name in filter(None, names):
        entry, is_new = name, True
        while entry and is_new:
            folder, _, last = entry.rstrip("/").rpartition("/")
            is_new = folder not in folders
            folders.setdefault(folder, set()).add(last + "/" * entry.endswith("/"))
            entry = folder and f"{folder}/"
    for folder in filter(None, folders):
        above, _, last = folder.rpartition("/")
        folders[above].discard(last)
    return folders
