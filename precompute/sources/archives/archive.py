"""The common part of zips and tars: members are found by name, and a name never becomes a path.

Archives are untrusted. They are read in place and never extracted, so links and names with `..` lead nowhere. A member
that is a symbolic link, occurs twice, or has a wrong size is rejected alone; an archive whose table of contents cannot
be trusted is refused whole. An index takes some 90 bytes per member.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.names import ChosenNames, Listing, NameColumns, Names, is_utf8

MAX_FILE_BYTES = 256 * 2**20
"""Larger image files are rejected unread; the largest photograph formats stay well below."""

MISSING = "missing"

DAMAGED = "damaged archive member"
"""The kind of reject for a member that is not what the archive says."""

MemberT = TypeVar("MemberT")

TEXT_SUFFIXES = (".txt", ".json")

KEPT_TEXT_BYTES = 64 * 2**10
"""Largest text of a tar that is kept in memory until it is read; a sample's text takes a kilobyte."""

LAST_EXACT = 2**53
"""Integers up to here are exact as floating-point numbers."""


class TarMember(NamedTuple):
    """The location of a tar's member, or why it cannot be read."""

    offset: int
    size: int
    mtime: float
    problem: str | None
    """Why it cannot be read; None if it can."""
    linked_to: str | None = None
    """For a hard link, the name of the member that holds the file's bytes."""

    @property
    def is_plain(self) -> bool:
        """Whether a ROW can hold it."""
        return self.problem is None and self.linked_to is None and -LAST_EXACT <= self.mtime <= LAST_EXACT

    def is_small_text(self, name: str) -> bool:
        return self.is_plain and self.size <= KEPT_TEXT_BYTES and name.lower().endswith(TEXT_SUFFIXES)


class ArchiveIndex(NamedTuple):
    """An archive's table of contents; members are numbered in its own order."""

    names: NameColumns
    rows: NDArray[np.uint8]
    """A packed ROW per member, of the archive's kind."""
    is_listed: NDArray[np.bool_]
    is_misplaced: NDArray[np.bool_]
    """Whether a zip's member shares bytes with others or lies outside the zip; empty for a tar."""
    prefix: str
    """The top folder of all members, which names may omit."""
    not_utf8: list[int]
    others: dict[int, TarMember]
    """A tar's members that a ROW cannot hold, by number."""


def index_of(members: Iterable[tuple[str, bytes]]) -> ArchiveIndex:
    """Make the index of members, given as name and ROW; leave empty what only zips or only tars have."""
    rows, metadata, not_utf8 = bytearray(), list[int](), list[int]()

    def kept() -> Iterator[str]:
        for number, (name, row) in enumerate(members):
            rows.extend(row)
            if is_mac_metadata(name):
                metadata.append(number)
            elif not is_utf8(name):
                not_utf8.append(number)
            yield name

    names = Names(kept())
    is_listed = names.times > 0
    is_listed[metadata] = False
    prefix = common_top(ChosenNames(names, np.flatnonzero(is_listed)))
    is_listed[not_utf8] = False
    return ArchiveIndex(
        names=names.columns,
        rows=np.frombuffer(rows, np.uint8),
        is_listed=is_listed,
        is_misplaced=np.empty(0, bool),
        prefix=prefix,
        not_utf8=not_utf8,
        others={},
    )


class Archive(Generic[MemberT]):
    """An archive's members by name; names may omit a common top folder; macOS metadata is ignored."""

    def __init__(self, file: File, index: ArchiveIndex) -> None:
        self._file, self._name = file, str(file).rpartition("/")[2]
        self.use_index(index)

    def use_index(self, index: ArchiveIndex) -> None:
        """Use this index, or an equal one in other memory."""
        self.index, self._names = index, Names(index.names)

    @property
    def not_utf8(self) -> list[str]:
        """Names that are not UTF-8, in the archive's own order."""
        return [self._names[number] for number in self.index.not_utf8 if self._names.times[number]]

    @property
    def names(self) -> ChosenNames:
        """Names that are UTF-8, in the archive's own order."""
        return ChosenNames(self._names, np.flatnonzero(self.index.is_listed))

    def listing(self) -> Listing:
        names = ChosenNames(self._names, self._names.in_order(self.index.is_listed))
        return Listing(names=names, not_utf8=sorted(self.not_utf8), linked_folders=[], caches=[])

    def version(self) -> str:
        return self._file.version.stamp

    @abstractmethod
    def _member(self, number: int) -> MemberT:
        """Return the member with this number."""

    def find(self, name: str) -> MemberT | None:
        """Return the member; None if there is none or more than one, so that the fingerprint says MISSING."""
        return self._single_member(self._find_number(name))

    def find_exact(self, name: str) -> MemberT | None:
        """Return the member with this full name; None if there is none or more than one."""
        return self._single_member(self._names.find(name))

    def _single_member(self, number: int | None) -> MemberT | None:
        return None if number is None or self._names.times[number] > 1 else self._member(number)

    def _number(self, name: str) -> int:
        """Return a member's number; raise Rejected if there is none or more than one."""
        if (number := self._find_number(name)) is None:
            raise Rejected(MISSING, f"{name} is not in {self._name}")
        if (times := self._names.times[number]) > 1:
            raise Rejected("ambiguous archive member", f"{name} occurs {times} times in {self._name}")
        return number

    def _find_number(self, name: str) -> int | None:
        numbers = (self._names.find(full) for full in (name, self.index.prefix + name))
        return next((number for number in numbers if number is not None), None)


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


def is_mac_metadata(name: str) -> bool:
    """Return whether a file is macOS metadata.

    `._a.jpg` (AppleDouble) holds attributes of `a.jpg`, in zips below `__MACOSX`; `.DS_Store` holds a folder's view.
    """
    if "._" not in name and "__MACOSX" not in name and ".DS_Store" not in name:  # fast path for nearly all names
        return False
    *folders, last = PurePosixPath(name).parts or ("",)
    return last.startswith("._") or last == ".DS_Store" or "__MACOSX" in folders


def refuse_large(name: str, size: int, max_bytes: int = MAX_FILE_BYTES) -> None:
    if size > max_bytes:
        raise Rejected("too large", f"{name} is {size:,} bytes, more than {max_bytes:,}")
