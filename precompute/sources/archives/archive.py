"""The common part of zips and tars: planning finds members by name, and a name never becomes a path.

Archives are untrusted. They are read in place and never extracted, so links and names with `..` lead nowhere. A member
that is a link, occurs twice, or has a wrong size is rejected alone; an archive whose index cannot be trusted is refused
whole. An index takes some 600 bytes per member, in the process that plans.
"""

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.images import ImageStore
from precompute.sources.listing import NOT_UTF8, Listing, is_mac_metadata, is_utf8
from precompute.sources.place import DAMAGED, MISSING, NOWHERE, Located, Place


class Index(NamedTuple):
    places: dict[str, Place]
    not_utf8: int
    prefix: str
    """The top folder of all members, which names may omit."""


class Archive(ImageStore):
    """Images in an archive; macOS metadata is ignored."""

    def __init__(self, file: File) -> None:
        self._file, self._reading = file, threading.Lock()
        self._index: Index | None = None

    @property
    def index(self) -> Index:
        """The members, read once; SourceError if the archive cannot be read to its end."""
        with self._reading:
            if self._index is None:
                self._index = self._indexed()
            return self._index

    def _indexed(self) -> Index:
        places, not_utf8 = dict[str, Place](), 0
        for name, place in self._members():
            if is_mac_metadata(name):
                continue
            if not is_utf8(name):
                not_utf8 += 1
            elif name in places:
                problem = f"ambiguous archive member: {name} occurs more than once in {self._last_name}"
                places[name] = Place(problem=problem)
            else:
                places[name] = place
        return Index(places, not_utf8, common_top(places))

    @property
    def _last_name(self) -> str:  # reasons to reject are bytes of a cache, wherever its source lies
        return str(self._file).rpartition("/")[2]

    @abstractmethod
    def _members(self) -> Iterable[tuple[str, Place]]:
        """Yield the name and place of every member except folders; raise SourceError for an unusable archive."""

    @abstractmethod
    def _read_at(self, name: str, place: Place) -> bytes:
        """Read a member; raise Rejected DAMAGED unless it is the planned one."""

    def listing(self) -> Listing:
        return Listing(dict.fromkeys(sorted(self.index.places)), +Counter({NOT_UTF8: self.index.not_utf8}))

    def version(self) -> str:
        return self._file.version.stamp

    def locate(self, name: str) -> Located:
        index = self.index
        place = index.places.get(name) or index.places.get(index.prefix + name)
        if place is None:
            return NOWHERE
        return Located(MISSING if place.problem else self._fingerprint(place), place)

    def _fingerprint(self, place: Place) -> str:
        return f"{place.crc32:08x}:{place.size}"

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        """Read a member's first bytes where it was just found; the whole member is read later, and checked."""
        if place is None or place.problem:
            return self.read(name, place)
        return self._head_at(name, place)

    @abstractmethod
    def _head_at(self, name: str, place: Place) -> bytes: ...

    def read(self, name: str, place: Place | None = None) -> bytes:
        """Read a member where it was planned; if it is not there, look it up: the archive was written again."""
        if place and not place.problem:
            try:
                return self._read_at(name, place)
            except Rejected as rejected:
                if rejected.kind != DAMAGED:
                    raise
        now = self.locate(name).place
        if now is None:
            raise Rejected(MISSING, f"{name} is not in {self._last_name}")
        if now.problem:
            raise Rejected(*now.problem.split(": ", 1))
        return self._read_at(name, now)


def damaged(name: str, problem: str) -> Rejected:
    return Rejected(DAMAGED, f"{name}: {problem}")


def common_top(names: Iterable[str]) -> str:
    """Return the top folder of all names, with its slash; empty if they have no common one."""
    top = ""
    for name in names:
        if not (top and name.startswith(top)):
            found = f"{PurePosixPath(name).parts[0]}/" if "/" in name else ""
            if not found or top not in ("", found):
                return ""
            top = found
    return top
