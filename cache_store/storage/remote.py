"""Stores behind a network, stores that wrap a store, and a store that is listed only once."""

import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from cache_store.errors import ConfigError
from cache_store.storage.ahead import AheadReader, PartReader
from cache_store.storage.calls import map_concurrently
from cache_store.storage.files import map_file
from cache_store.storage.local import WRITE_BYTES
from cache_store.storage.publish import name_scratch_in_errors, scratch_file, scratch_folder
from cache_store.storage.verbs import MAX_READ_BYTES, Data, Draft, File, Ranges, Store, Version, missing_error

PART_BYTES = 8 << 20
"""A larger part of a file is fetched in pieces of this size, several at the same time."""

COPIED_BYTES = 16 << 20
"""Bytes copied to a local file at a time."""


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
            yield Draft(self, name, path, stream, scratch_folder())


@dataclass(frozen=True)
class UrlStore(RemoteStore):
    """A store below a URL, which has no slash at its end."""

    url: str

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        """Return the store of the URL `scheme://place`; ConfigError if it names no bucket."""
        if not place.strip("/") or place.startswith("/"):
            raise ConfigError(f"{scheme}://{place} names no bucket; a URL is {scheme}://BUCKET/FOLDER")
        return cls(f"{scheme}://{place.rstrip('/')}")

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class WrappedStore(RemoteStore):
    """A store that passes every call on to another store; each subclass changes some of the calls."""

    inner: Store

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    @property
    def has_exclusive_claims(self) -> bool:
        return self.inner.has_exclusive_claims

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
    """A file that is read by ranges; each range is checked to come from the version that was opened."""

    def __init__(self, store: Store, name: str, version: Version) -> None:
        self._store, self._name = store, name
        super().__init__(AheadReader(version.size, self._fetch), store.where(name), version)
        self._parts = PartReader(version.size, self._fetch)

    def reopen(self) -> Self:
        return type(self)(self._store, self._name, self.version)

    def part(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.version.size)
        if stop - start > PART_BYTES:
            spans = [(first, min(first + PART_BYTES, stop)) for first in range(start, stop, PART_BYTES)]
            return b"".join(map_concurrently(lambda span: self._fetch(*span), spans))
        return bytes(self._parts.part(start, stop)) if start < stop else b""

    def refuse_changed(self) -> None:
        """Do nothing: every range was checked when it was read."""

    def _fetch(self, start: int, stop: int) -> memoryview:
        return self._store.fetch([Ranges(self._name, [start], [stop - start], version=self.version)])[0][0]


def with_listing(store: Store) -> Store:
    """Return a store for looking at many files: a remote store is then listed once, with all names and versions."""
    return ListedStore(store) if store.is_remote else store


@dataclass(frozen=True)
class ListedStore(WrappedStore):
    """A store with the names and versions of one listing, made at first use; files written later can only be read."""

    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    found: list[Mapping[str, Version]] = field(default_factory=list, compare=False, repr=False)
    """The one listing, once it was made."""

    def stat(self, name: str) -> Version:
        if (version := self.versions.get(name)) is None:
            raise missing_error(self.where(name))
        return version

    def list(self, folder: str = "") -> list[str]:
        return sorted(self.entries.get(folder, ()))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return ((name, version) for name, version in self.versions.items() if name > after)

    @property
    def versions(self) -> Mapping[str, Version]:
        """The version of each file, by name."""
        with self.lock:
            if not self.found:
                self.found.append({name: version for name, version in self.inner.walk() if version is not None})
            return self.found[0]

    @cached_property
    def entries(self) -> Mapping[str, set[str]]:
        """The entries of each folder."""
        return entries_by_folder(self.versions)


def entries_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the direct entries of each folder, the top folder being ""; names of folders end in a slash.

    An object that only marks a folder has the folder's name and is not an entry of it.
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
