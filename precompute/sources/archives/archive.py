"""What zips and tars share: members found by name; a name never becomes a path.

Archives are untrusted. They are read in place and never extracted, so links and names with `..` lead nowhere. A member
that is a symbolic link, occurs twice, or has a wrong size is rejected alone; an archive whose table of contents cannot
be trusted is refused whole. An index takes about a kilobyte for each member.
"""

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.archives.listing import Listing, is_utf8
from precompute.sources.files.file import SourceFile

MAX_FILE_BYTES = 256 * 2**20
"""Larger image files are rejected unread; the largest photograph formats stay well below."""

MISSING = "missing"

DAMAGED = "damaged archive member"
"""Kind of reject for a member that does not hold what the archive says."""

MemberT = TypeVar("MemberT")


class Archive(Generic[MemberT]):
    """An archive's members by name; names may omit a top folder that all share; macOS metadata does not count."""

    def __init__(self, file: SourceFile, members: Iterable[tuple[str, MemberT]]) -> None:
        self._file = file
        self._members: dict[str, MemberT] = {}
        self._repeated: Counter[str] = Counter()
        for name, member in members:
            if name in self._members:
                self._repeated[name] += 1
            self._members[name] = member
        self.names = [name for name in self._members if not is_mac_metadata(name)]
        """In the archive's own order."""
        self._prefix = common_top(self.names)

    def listing(self) -> Listing:
        not_utf8 = sorted(name for name in self.names if not is_utf8(name))
        names = sorted(set(self.names).difference(not_utf8)) if not_utf8 else sorted(self.names)
        return Listing(names=names, not_utf8=not_utf8, linked_folders=[], caches=[])

    def exact(self, name: str) -> MemberT | None:
        """The member of this full name; None where there is none, or several."""
        return None if name in self._repeated else self._members.get(name)

    def find(self, name: str) -> MemberT | None:
        """The member, or None where there is none, or several: a fingerprint then says that nothing can be read."""
        full = self._full_name(name)
        return None if full is None else self.exact(full)

    def get(self, name: str) -> MemberT:
        """The member; Rejected where there is none, or where it is not clear which."""
        full = self._full_name(name)
        if full is None:
            raise Rejected(MISSING, f"{name} is not in {self._file.name}")
        if times := self._repeated[full]:
            raise Rejected("ambiguous archive member", f"{name} occurs {times + 1} times in {self._file.name}")
        return self._members[full]

    def _full_name(self, name: str) -> str | None:
        return next((full for full in (name, self._prefix + name) if full in self._members), None)


def common_top(names: Iterable[str]) -> str:
    """Return the folder that all names begin with, and its slash; empty where there is none."""
    tops = {PurePosixPath(name).parts[0] if "/" in name else "" for name in names}
    (top,) = tops if len(tops) == 1 else ("",)
    return f"{top}/" if top else ""


class BoundedReader(io.BufferedReader):
    """A file whose single reads are bounded, for a library that trusts the lengths in it."""

    def __init__(self, file: SourceFile, open_raw: Callable[[], io.RawIOBase], max_read_bytes: int) -> None:
        super().__init__(open_raw())
        self.size = self.seek(0, os.SEEK_END)
        self.seek(0)
        self._file, self._bound = file, max_read_bytes

    def __del__(self) -> None:
        if "_bound" in vars(self):  # else it was never opened
            self.close()  # with the archive that it belongs to

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self.size - self.tell() if size is None or size < 0 else size
        if wanted > self._bound:
            raise SourceError(f"{self._file}: its table of contents needs {wanted:,} bytes, more than {self._bound:,}")
        return super().read(max(wanted, 0))


def is_mac_metadata(name: str) -> bool:
    """Whether the file is metadata that macOS added.

    `._a.jpg` (AppleDouble) holds attributes of `a.jpg`, in zips below `__MACOSX`; `.DS_Store` holds a folder's view.
    """
    *folders, last = PurePosixPath(name).parts or ("",)
    return last.startswith("._") or last == ".DS_Store" or "__MACOSX" in folders


def refuse_large(name: str, size: int, max_bytes: int = MAX_FILE_BYTES) -> None:
    if size > max_bytes:
        raise Rejected("too large", f"{name} is {size:,} bytes, more than {max_bytes:,}")
