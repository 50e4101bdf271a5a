"""A store as one listing finds it; and the entries of folders, which object stores do not have, by all names."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cache_store.storage.files import missing
from cache_store.storage.remote import WrappedStore
from cache_store.storage.verbs import Store, Version


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
