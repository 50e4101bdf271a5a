"""What zips and tars share: members found by name; a name never becomes a path.

Archives are untrusted. They are read in place and never extracted, so links and names with `..` lead nowhere. A member
that is a symbolic link, occurs twice, or has a wrong size is rejected alone; an archive whose table of contents cannot
be trusted is refused whole. An index takes some 90 bytes for each
member.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_store.storage.verbs import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.names import ChosenNames, Listing, NameColumns, Names, is_utf8

MAX_FILE_BYTES = 256 * 2**20
"""Larger image files are rejected unread; the largest photograph formats stay well below."""

MISSING = "missing"

DAMAGED = "damaged archive member"
"""Kind of reject for a member that does not hold what the archive says."""

MemberT = TypeVar("MemberT")

TEXT_SUFFIXES = (".txt", ".json")

KEPT_TEXT_BYTES = 64 * 2**10
"""Largest text of a tar that is kept in memory until it is asked for; a sample's take a kilobyte."""

LAST_EXACT = 2**53
"""Integers up to here are exact as floating-point numbers."""


class TarMember(NamedTuple):
    """Where a tar's member lies, or why it cannot be read."""

    offset: int
    size: int
    mtime: float
    problem: str | None
    """Why it cannot be read."""
    linked_to: str | None = None
    """Of a hard link, the name of the member that holds the file's bytes."""

    @property
    def is_plain(self) -> bool:
        """Whether a ROW holds all of it."""
        return self.problem is None and self.linked_to is None and -LAST_EXACT <= self.mtime <= LAST_EXACT

    def is_small_text(self, name: str) -> bool:
        return self.is_plain and self.size <= KEPT_TEXT_BYTES and name.lower().endswith(TEXT_SUFFIXES)


class ArchiveIndex(NamedTuple):
    """An archive's table of contents; members are numbered in its own order."""

    names: NameColumns
    rows: NDArray[np.uint8]
    """Bytes that say where each member lies, by its kind of archive."""
    is_listed: NDArray[np.bool_]
    is_misplaced: NDArray[np.bool_]
    """Members of a zip that share bytes with others or lie outside of it; empty for a tar."""
    prefix: str
    """The top folder that all share, which names may omit."""
    not_utf8: list[int]
    others: dict[int, TarMember]
    """Members of a tar that a row cannot hold, by number."""


def index_of(members: Iterable[tuple[str, bytes]]) -> ArchiveIndex:
    """Make the index of members, each a name and its row; what only zips or only tars have is left empty."""
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
    """An archive's members by name; names may omit a top folder that all share; macOS metadata does not count."""

    def __init__(self, file: File, index: ArchiveIndex) -> None:
        self._file, self._name = file, str(file).rpartition("/")[2]
        self.go_by(index)

    def go_by(self, index: ArchiveIndex) -> None:
        """Take an equal index, held elsewhere."""
        self.index, self._names = index, Names(index.names)

    @property
    def not_utf8(self) -> list[str]:
        """Names that cannot enter a table, in the archive's own order."""
        return [self._names[number] for number in self.index.not_utf8 if self._names.times[number]]

    @property
    def names(self) -> ChosenNames:
        """Names that can, in the archive's own order."""
        return ChosenNames(self._names, np.flatnonzero(self.index.is_listed))

    def listing(self) -> Listing:
        names = ChosenNames(self._names, self._names.in_order(self.index.is_listed))
        return Listing(names=names, not_utf8=sorted(self.not_utf8), linked_folders=[], caches=[])

    def version(self) -> str:
        return self._file.version.stamp

    @abstractmethod
    def _member(self, number: int) -> MemberT:
        """By the number of its name."""

    def exact(self, name: str) -> MemberT | None:
        """The member of this full name; None where there is none, or several."""
        number = self._names.find(name)
        return None if number is None or self._names.times[number] > 1 else self._member(number)

    def find(self, name: str) -> MemberT | None:
        """The member, or None where there is none, or several: a fingerprint then says that nothing can be read."""
        number = self._found(name)
        return None if number is None or self._names.times[number] > 1 else self._member(number)

    def _number(self, name: str) -> int:
        """The number of a member; Rejected where there is none, or where it is not clear which."""
        if (number := self._found(name)) is None:
            raise Rejected(MISSING, f"{name} is not in {self._name}")
        if (times := self._names.times[number]) > 1:
            raise Rejected("ambiguous archive member", f"{name} occurs {times} times in {self._name}")
        return number

    def _found(self, name: str) -> int | None:
        numbers = (self._names.find(full) for full in (name, self.index.prefix + name))
        return next((number for number in numbers if number is not None), None)


def common_top(names: Iterable[str]) -> str:
    """Return the folder that all names begin with, and its slash; empty where there is none."""
    top = ""
    for name in names:
        if not (top and name.startswith(top)):
            found = f"{PurePosixPath(name).parts[0]}/" if "/" in name else ""
            if not found or top not in ("", found):
                return ""
            top = found
    return top


def is_mac_metadata(name: str) -> bool:
    """Whether the file is metadata that macOS added.

    `._a.jpg` (AppleDouble) holds attributes of `a.jpg`, in zips below `__MACOSX`; `.DS_Store` holds a folder's view.
    """
    if "._" not in name and "__MACOSX" not in name and ".DS_Store" not in name:  # nearly all: a tenth of the time
        return False
    *folders, last = PurePosixPath(name).parts or ("",)
    return last.startswith("._") or last == ".DS_Store" or "__MACOSX" in folders


def refuse_large(name: str, size: int, max_bytes: int = MAX_FILE_BYTES) -> None:
    if size > max_bytes:
        raise Rejected("too large", f"{name} is {size:,} bytes, more than {max_bytes:,}")
