"""Stores that wrap a store; here is one that is listed only once."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cache_store.storage.protocol import MAX_READ_BYTES, Data, Ranges, Store, Version, missing_error
from cache_store.storage.remote import RemoteStore


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
class ListedStore(WrappedStore):
    """A store with the names and versions of one listing, made at first use; files written later can only be read."""

    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def versions(self) -> Mapping[str, Version]:
        with self.lock:
            return self._versions

    @cached_property
    def _versions(self) -> Mapping[str, Version]:
        return {name: version for name, version in self.inner.walk() if name and version is not None}

    @cached_property
    def _names(self) -> Sequence[str]:
        return sorted(self.versions)

    def stat(self, name: str) -> Version:
        if (version := self.versions.get(name)) is None:
            raise missing_error(self.where(name))
        return version

    def list(self, folder: str = "") -> list[str]:
        """List a folder; an object that only marks a folder has its name, and is not an entry."""
        prefix, entries = folder and f"{folder}/", set[str]()
        place = bisect_left(self._names, prefix)
        while place < len(self._names) and (name := self._names[place]).startswith(prefix):
            entry, slash, _ = name[len(prefix) :].partition("/")
            entries.add(entry + slash)
            place = bisect_left(self._names, f"{prefix}{entry}0", place) if slash else place + 1  # "0" follows "/"
        return sorted(entries - {each[:-1] for each in entries if each.endswith("/")})

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return ((name, version) for name, version in self.versions.items() if name > after)
