"""Stores that wrap a store: one that is listed only once, and one that keeps blocks of its files on this machine."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cache_store.storage.kept import KeptBlocks
from cache_store.storage.remote import RemoteStore
from cache_store.storage.verbs import MAX_READ_BYTES, Data, Ranges, Store, Version, missing_error


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


@dataclass(frozen=True)
class KeptStore(WrappedStore):
    """A store that keeps blocks of the files whose SHA-256 is known in a folder of this machine."""

    blocks: KeptBlocks

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        if all(each.sha256 for each in wanted):
            return self.blocks.fetch(wanted, self.inner.fetch)
        return self.inner.fetch(wanted)


@dataclass(frozen=True)
class ListedStore(WrappedStore):
    """A store with the names and versions of one listing, made at first use; files written later can only be read."""

    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def stat(self, name: str) -> Version:
        if (version := self.versions.get(name)) is None:
            raise missing_error(self.where(name))
        return version

    def list(self, folder: str = "") -> list[str]:
        with self.lock:
            return sorted(self._entries.get(folder, ()))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return ((name, version) for name, version in self.versions.items() if name > after)

    @property
    def versions(self) -> Mapping[str, Version]:
        """The version of each file, by name."""
        with self.lock:
            return self._versions

    @cached_property
    def _versions(self) -> Mapping[str, Version]:
        return {name: version for name, version in self.inner.walk() if version is not None}

    @cached_property
    def _entries(self) -> Mapping[str, set[str]]:
        """The entries of each folder."""
        return entries_by_folder(self._versions)


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
