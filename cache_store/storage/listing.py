"""Folders, which object stores do not have: names below a URL, and what lies in each folder of all names."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from cache_store.errors import ConfigError


@dataclass(frozen=True)
class UrlFolder:
    """Names below a URL that has no slash at its end."""

    url: str

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        """ConfigError where no bucket is named."""
        if not place.strip("/") or place.startswith("/"):
            raise ConfigError(f"{scheme}://{place} names no bucket; a URL is {scheme}://BUCKET/FOLDER")
        return cls(f"{scheme}://{place.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def entries_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    """What lies directly in each folder, "" being the top; names of folders end in a slash.

    An object that only marks a folder is named as the folder is, and is no entry.
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
