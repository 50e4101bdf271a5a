"""Images in an uncompressed tar, read in place by offset.

tarfile makes the index and nothing else: names, offsets and sizes. It trusts headers, so its reads are bounded and its
results checked. Texts are read on the way, since they lie between headers.
"""

import io
import re
import struct
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import (
    DAMAGED,
    MAX_FILE_BYTES,
    MISSING,
    Archive,
    refuse_large,
)
from precompute.sources.files.file import SourceFile

MAX_EXTENDED_HEADER_BYTES = 16 * 2**10
"""Twice the longest path."""

TEXT_SUFFIXES = (".txt", ".json")

KEPT_TEXT_BYTES, MOST_KEPT_BYTES = 64 * 2**10, 64 * 2**20
"""Of one text and of all of a tar, which are in memory until they are dropped; a sample's take a kilobyte."""

KEPT_COSTS = 160
"""Bytes that Python takes beside each."""

MAX_LINKS = 40
"""From one name of a file to the next, as Linux follows symbolic links; tar itself links to the first."""

MAX_GLOBAL_HEADERS = 100
"""Keys that apply to all members; tarfile copies them for each."""

LONG_NUMBER = re.compile(rb"\d{100}")
"""tarfile's pattern for extended headers takes time that grows with the square of a run of digits."""

TAR_MAGIC = slice(257, 262), b"ustar"

INDEX_ERRORS = (tarfile.TarError, OSError, ValueError, LookupError, OverflowError, TypeError, RecursionError)
"""What tarfile raises for headers that are cut, damaged, or lie."""


ROW = struct.Struct("<qqd?")
"""Of a plain file: place, bytes, time, whether that is a whole number. All bits of the others are 0."""

LAST_EXACT = 2**53
"""Integers up to here are exact as floating-point numbers."""


class TarMember(NamedTuple):
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


class ImageTar(Archive[TarMember]):
    """Images in a tar."""

    def __init__(self, file: SourceFile) -> None:
        self._texts: dict[int, bytes] = {}
        """By offset."""
        self._others: dict[int, TarMember] = {}
        """Links, and what cannot be read, by number."""
        super().__init__(file, self._packed(read_index(file, self._texts)))

    def _packed(self, members: Iterable[tuple[str, TarMember]]) -> Iterator[tuple[str, bytes]]:
        for number, (name, member) in enumerate(members):
            if member.is_plain:
                yield name, ROW.pack(member.offset, member.size, member.mtime, isinstance(member.mtime, int))
            else:
                self._others[number] = member
                yield name, bytes(ROW.size)

    def _member(self, number: int) -> TarMember:
        if found := self._others.get(number):
            return found
        offset, size, mtime, is_whole = ROW.unpack_from(self._rows, number * ROW.size)
        return TarMember(offset, size, int(mtime) if is_whole else mtime, None)

    def fingerprint(self, name: str) -> str:
        """With the time of the tar itself: unlike a zip, it has no checksum of its members."""
        if (found := self.find(name)) is None:
            return MISSING
        member = self._followed(found)
        return f"{member.size}:{member.mtime}:{self._file.version.mark}"

    def drop_texts(self) -> None:
        self._texts.clear()

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        member = self._followed(self._member(self._number(name)))
        if member.problem:
            raise Rejected(DAMAGED, f"{name}: {member.problem}")
        refuse_large(name, member.size, max_bytes)
        if (text := self._texts.get(member.offset)) is not None:
            return text
        return self._file.part(member.offset, member.size)

    def _followed(self, member: TarMember) -> TarMember:
        """The member itself or, of a hard link, the earlier member that holds the file, as links before it may say."""
        found = member
        for _ in range(MAX_LINKS):
            if found.linked_to is None:
                return found
            target = self.exact(found.linked_to)
            if target is None or target.problem or target.offset >= found.offset:
                break
            found = target
        return member._replace(problem="is a link, and not to a file that comes before it in the tar")


class TarHeaders(io.BufferedReader):
    """The tar as tarfile sees it: single reads are bounded, since it trusts the lengths in headers."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file.skimmed())
        self._file, self.size = file, file.version.size

    def __del__(self) -> None:
        if "_file" in vars(self):  # else it was never opened
            self.close()

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise tarfile.ReadError("a header of negative size")
        if size > MAX_EXTENDED_HEADER_BYTES:
            most = f"{MAX_EXTENDED_HEADER_BYTES:,}"
            raise SourceError(f"{self._file}: its table of contents needs {size:,} bytes, more than {most}")
        data = super().read(size)
        if size > tarfile.BLOCKSIZE and LONG_NUMBER.search(data):
            raise tarfile.ReadError("an extended header that is not text")
        return data

    def text(self, member: TarMember) -> bytes:
        self.seek(member.offset)
        return super().read(member.size)


def read_index(file: SourceFile, texts: dict[int, bytes]) -> Iterator[tuple[str, TarMember]]:
    """Every member but folders, by name; SourceError where the tar cannot be followed to its end.

    Small texts are put into `texts`, by their offset.
    """
    left = MOST_KEPT_BYTES
    with TarHeaders(file) as stream:
        try:
            archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 (there is nothing in it to close)
            position = -1
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
                if member.offset <= position or len(archive.pax_headers) > MAX_GLOBAL_HEADERS:
                    raise tarfile.ReadError(f"headers out of order at byte {member.offset:,}")
                position = member.offset
                if not member.isdir():
                    found = read_member(member, stream.size)
                    if found.is_small_text(member.name) and (left := left - found.size - KEPT_COSTS) >= 0:
                        texts[found.offset] = stream.text(found)
                    yield as_posix(member.name), found
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
        except INDEX_ERRORS as error:
            if isinstance(error, OSError) and error.filename is not None:  # a network's, which is no fault of the tar
                raise
            raise SourceError(f"{file} is not a tar that can be read: {error}") from None
    if end != bytes(tarfile.BLOCKSIZE):
        raise SourceError(f"{file} is damaged or cut short at byte {archive.offset:,}: neither a member nor an end")
    file.refuse_changed()


def as_posix(name: str) -> str:
    """`./a//b` and `a/b` are one name."""
    return PurePosixPath(name).as_posix()


def read_member(member: tarfile.TarInfo, tar_bytes: int) -> TarMember:
    problem = linked_to = None
    if member.islnk():
        linked_to = as_posix(member.linkname)
    elif member.issym():
        problem = "is a link"
    elif not member.isreg():
        problem = "is not a file"
    elif member.issparse():
        problem = "is a sparse file"
    elif member.size < 0 or member.offset_data + member.size > tar_bytes:
        problem = f"claims {member.size:,} bytes, more than the tar has"
    return TarMember(member.offset_data, member.size, member.mtime, problem, linked_to)


def is_tar(name: str, head: bytes) -> bool:
    """By the magic of POSIX and GNU tars, or by the name: the oldest tars have no magic."""
    place, magic = TAR_MAGIC
    return head[place] == magic or name.lower().endswith(".tar")
