"""Images in a zip, stored or deflated: zipfile reads the index, and only that; members are read and checked here."""

import shlex
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, cast

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.sources.archives.archive import Archive, damaged, unreadable
from precompute.sources.place import DAMAGED, HEADER_BYTES, Place, refuse_large

MEMBER_MAGIC = b"PK\3\4"
"""First bytes of a member."""

END_MAGIC, END = b"PK\5\6", struct.Struct("<16xLxx")
"""The end record: its first bytes, and the offset of the index; a comment may follow."""
MAX_COMMENT_BYTES = 2**16
ZIP64 = 2**32 - 1
"""Stands for an offset that another record has."""

HEADER = struct.Struct("<4s22xHH")
"""A member's header: magic, length of the name, length of extra fields."""

EXTRA_BYTES = 64
"""Bytes of extra fields to read with a member; only its header has the true number, mostly a smaller one."""

ENCRYPTED, PATCHED, STRONGLY_ENCRYPTED = 1, 1 << 5, 1 << 6
"""Flags."""

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Methods that are read. Others can pack a gigabyte into a kilobyte, and images are not stored that way."""

MAX_INDEX_BYTES = 2**30
"""Largest index that is read: 10 million members."""

INDEX_ERRORS = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError, struct.error)
"""Errors that zipfile raises for an index that is truncated, damaged or wrong."""


class ZipIndexStream:
    """The zip's stream for zipfile: reads are bounded, because zipfile trusts the lengths in the zip."""

    def __init__(self, file: File, where: str) -> None:
        self._file, self._where = file, where
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self.failed: OSError | None = None
        """The store's error, which zipfile takes for a file that is no zip."""

    def read(self, size: int = -1) -> bytes:
        if size > MAX_INDEX_BYTES:
            raise SourceError(f"{self._where}: its index needs {size:,} bytes, more than {MAX_INDEX_BYTES:,}")
        try:
            return self._file.read(size)
        except OSError as error:
            self.failed = error
            raise


class ImageZip(Archive):
    """Images in a zip."""

    def _members(self) -> Iterable[tuple[str, Place]]:
        head, stated = self._file.part(0, len(MEMBER_MAGIC)), stated_start(self._file)
        if stated is None:
            raise SourceError(f"{self._file} {why_without_index(self._file, head)}")
        with self._file.reopen() as opened:
            stream = ZipIndexStream(opened, str(self._file))
            try:
                table = zipfile.ZipFile(cast("IO[bytes]", stream))
            except INDEX_ERRORS as error:
                raise stream.failed or unreadable(self._file, "zip", error) from None
        self._file.refuse_changed()
        if head == MEMBER_MAGIC and stated not in (table.start_dir, ZIP64):  # the index is of a zip inside this one
            raise SourceError(f"{self._file} {why_without_index(self._file, head)}")
        in_order = sorted(table.infolist(), key=lambda each: each.header_offset)
        return self._placed(table.infolist(), misplaced(in_order, table.start_dir))

    def _placed(self, members: Iterable[zipfile.ZipInfo], is_misplaced: set[int]) -> Iterator[tuple[str, Place]]:
        for each in members:
            if each.is_dir():
                continue
            problem = why_unreadable(each)
            if problem is None and id(each) in is_misplaced:
                problem = "shares bytes with other members, or lies outside the archive"
            yield (
                each.filename,
                Place(
                    offset=each.header_offset,
                    length=each.compress_size,
                    size=each.file_size,
                    crc32=each.CRC,
                    deflated=each.compress_type == zipfile.ZIP_DEFLATED,
                    problem=problem and f"{DAMAGED}: {each.filename}: {problem}",
                ),
            )

    def _read_at(self, name: str, place: Place) -> bytes:
        refuse_large(name, max(place.size, place.length))
        return unpack(name, place, self._packed(name, place))

    def _head_at(self, name: str, place: Place) -> bytes:
        packed = self._packed(name, place._replace(length=min(place.length, HEADER_BYTES)))
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, HEADER_BYTES) if place.deflated else packed
        except zlib.error as error:
            raise damaged(name, str(error)) from None

    def _packed(self, name: str, place: Place) -> bytes:
        """Read the member's bytes, still compressed."""
        data = self._file.part(place.offset, HEADER.size + len(name) + EXTRA_BYTES + place.length)
        if not data.startswith(MEMBER_MAGIC) or len(data) < HEADER.size:
            raise damaged(name, f"no member begins at byte {place.offset:,}")
        start = HEADER.size + sum(HEADER.unpack_from(data)[1:])
        if (stop := start + place.length) > len(data):
            data += self._file.part(place.offset + len(data), stop - len(data))
        return data[start:stop]


def stated_start(file: File) -> int | None:
    """Return where the end record says that the index begins, from the zip's own beginning; None without a record."""
    tail = file.part(max(file.version.size - END.size - MAX_COMMENT_BYTES, 0), END.size + MAX_COMMENT_BYTES)
    place = tail.rfind(END_MAGIC, 0, max(len(tail) - END.size + len(END_MAGIC), 0))
    return None if place < 0 else int(END.unpack_from(tail, place)[0])


def why_unreadable(member: zipfile.ZipInfo) -> str | None:
    """Return why a member cannot be read, judged by its entry in the index; None if it can."""
    if stat.S_ISLNK(member.external_attr >> 16):
        return "is a link"
    if member.compress_type not in METHODS:
        return f"is compressed by method {member.compress_type}; stored and deflate are read"
    if member.flag_bits & PATCHED:
        return "is patched data"
    return "is encrypted" if member.flag_bits & (ENCRYPTED | STRONGLY_ENCRYPTED) else None


def misplaced(members: list[zipfile.ZipInfo], end: int) -> set[int]:
    """Return the ids of members that share bytes or lie outside [0, end): with them a zip could unpack to any size.

    `members` are in the order of their offsets.
    """
    inside = [each for each in members if each.header_offset >= 0 and stop_of(each) <= end]
    found = {id(each) for each in members} - {id(each) for each in inside}
    farthest, reached = 0, 0
    for each in inside:
        if each.header_offset < reached:
            found |= {id(each), farthest}
        if stop_of(each) > reached:
            farthest, reached = id(each), stop_of(each)
    return found


def stop_of(member: zipfile.ZipInfo) -> int:
    return member.header_offset + HEADER.size + member.compress_size


def unpack(name: str, place: Place, data: bytes) -> bytes:
    """Decompress a member, never beyond the size in its entry, and check its CRC-32."""
    if place.deflated:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(place.size, 1))
        except zlib.error as error:
            raise damaged(name, str(error)) from None
    data = data[: place.size]
    if len(data) != place.size:
        raise damaged(name, f"holds {len(data):,} bytes, claims {place.size:,}")
    if zlib.crc32(data) != place.crc32:
        raise damaged(name, "Bad CRC-32")
    return data


def why_without_index(file: File, head: bytes) -> str:
    """Say what is wrong with a file that has no index of its own."""
    if head == MEMBER_MAGIC:
        recover = shlex.join(["zip", "-FF", str(file), "--out", "mended.zip"])
        return (
            "starts as a zip, but the index at its end is missing: it was cut short or is still being written; "
            f"wait for it, copy it again, or recover its contents: {recover}"
        )
    return f"is {'neither a zip nor a tar' if head else 'empty'}; expected a folder, a zip or a tar of images"
