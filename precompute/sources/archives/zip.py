"""Images in a zip, stored or deflated, read in place by a table of contents that is read in one pass.

It reads and refuses the same zips as `zipfile`, without a kilobyte of Python objects per member.
"""

import shlex
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import DAMAGED, MISSING, Archive, ArchiveIndex, index_of, refuse_large

MEMBER_MAGIC, ENTRY_MAGIC, END_MAGIC = b"PK\3\4", b"PK\1\2", b"PK\5\6"
"""First bytes of a member, of its entry in the table of contents, and of the end record, which locates the table."""

END = struct.Struct("<12xLLH")
"""The end record: size of the table, its offset, length of the comment that follows."""

END64, LOCATOR64 = struct.Struct("<4s36xQQ"), struct.Struct("<4sL8xL")
"""The two records before it in large zips; the second gives the number of disks."""
END64_MAGIC, LOCATOR64_MAGIC = b"PK\6\6", b"PK\6\7"

MAX_COMMENT_BYTES = 2**16
TAIL_BYTES = END64.size + LOCATOR64.size + END.size + MAX_COMMENT_BYTES
"""Bytes at the end of a zip that hold the three records and the longest comment."""

ENTRY = struct.Struct("<6xBxHH4xLLLHHH4xLL")
"""An entry: version needed to read it; flags, method; CRC-32, packed size, size; lengths of name, extra fields and
comment; attributes; offset.
"""

NEWEST_VERSION = 63
"""Newest version of the zip format that is read: 6.3, of 2006."""

ENCRYPTED, PATCHED, STRONGLY_ENCRYPTED, UTF8 = 1, 1 << 5, 1 << 6, 1 << 11
"""Flags; the last marks a name in UTF-8."""

STORED, DEFLATED = 0, 8
"""Supported methods. Others can pack a gigabyte into a kilobyte, and images are not stored that way."""

ZIP64, ZIP64_SIZE = 2**32 - 1, 2**64 - 1
"""Placeholders for a number that is stored in the extra field of this kind:"""
ZIP64_FIELD = 1

LARGEST_OFFSET = 2**61
"""Larger offsets are cut to this one; all are outside the archive."""

MAX_INDEX_BYTES = 2**30
"""Largest table of contents that is read: 10 million members."""

LOCAL_HEADER = struct.Struct("<4s2xH18xHH")
"""A member's header: magic, flags, length of the name, length of extra fields."""

LOCAL_EXTRA_BYTES = 64
"""Bytes of extra fields to read with a member; only its header has the true number, mostly a smaller one."""

ROW = struct.Struct("<qQQLHHH?")
ROW_TYPE = np.dtype("<i8, <u8, <u8, <u4, <u2, <u2, <u2, ?")


class ZipMember(NamedTuple):
    """A member's entry, in the order of ROW."""

    offset: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int
    name_bytes: int
    is_link: bool


class TableLocation(NamedTuple):
    """The location of a zip's table of contents."""

    start: int
    size: int
    shift: int
    """Bytes before the zip in its file, such as a program that unpacks it."""
    stated: int
    """The offset that the end record gives."""


class ImageZip(Archive[ZipMember]):
    """Images in a zip."""

    def __init__(self, file: File, index: ArchiveIndex | None = None) -> None:
        """Read the table of contents, unless an index made from it is given."""
        super().__init__(file, index or read_zip_index(file))

    def _member(self, number: int) -> ZipMember:
        return ZipMember(*ROW.unpack_from(self.index.rows.data, number * ROW.size))

    def fingerprint(self, name: str) -> str:
        member = self.find(name)
        return f"{member.crc:08x}:{member.size}" if member else MISSING

    def read(self, name: str) -> bytes:
        member = self._member(number := self._number(name))
        refuse_large(name, max(member.size, member.packed))
        problem = why_unreadable(member)
        if problem is None and self.index.is_misplaced[number]:
            problem = "shares bytes with other members, or lies outside the archive"
        if problem:
            raise Rejected(DAMAGED, f"{name}: {problem}")
        return unpack(name, member, self._packed(name, self._names[number], member))

    def _packed(self, name: str, full_name: str, member: ZipMember) -> bytes:
        """Read the member's bytes, still compressed."""
        likely_start = LOCAL_HEADER.size + member.name_bytes + LOCAL_EXTRA_BYTES
        data = self._file.part(member.offset, likely_start + member.packed)
        if len(data) < LOCAL_HEADER.size:
            raise Rejected(DAMAGED, f"{name}: Truncated file header")
        magic, flags, *lengths = LOCAL_HEADER.unpack_from(data)
        if magic != MEMBER_MAGIC:
            raise Rejected(DAMAGED, f"{name}: Bad magic number for file header")
        found = data[LOCAL_HEADER.size : LOCAL_HEADER.size + lengths[0]]
        if lengths[0] != member.name_bytes or decode_name(found, flags) != full_name:
            raise Rejected(DAMAGED, f"{name}: its names in the zip's index and in its header, {found!r}, differ")
        start = LOCAL_HEADER.size + sum(lengths)
        if (stop := start + member.packed) > len(data):
            data += self._file.part(member.offset + len(data), stop - len(data))
        return data[start:stop]


def why_unreadable(member: ZipMember) -> str | None:
    """Return why a member cannot be read, judged by its entry; None if it can."""
    if member.is_link:
        return "is a link"
    if member.method not in (STORED, DEFLATED):
        return f"is compressed by method {member.method}; stored and deflate are read"
    if member.flags & PATCHED:
        return "is patched data"
    return "is encrypted" if member.flags & (ENCRYPTED | STRONGLY_ENCRYPTED) else None


def unpack(name: str, member: ZipMember, data: bytes) -> bytes:
    """Decompress a member, never beyond the size in its entry, and check its CRC-32."""
    if member.method == DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(member.size, 1))
        except zlib.error as error:
            raise Rejected(DAMAGED, f"{name}: {error}") from None
    data = data[: member.size]
    if len(data) != member.size:
        raise Rejected(DAMAGED, f"{name}: holds {len(data):,} bytes, claims {member.size:,}")
    if zlib.crc32(data) != member.crc:
        raise Rejected(DAMAGED, f"{name}: Bad CRC-32")
    return data


def read_zip_index(file: File) -> ArchiveIndex:
    """Read a zip's table of contents; raise SourceError if it is not a whole zip."""
    size = file.version.size
    head, tail = file.part(0, len(MEMBER_MAGIC)), file.part(max(size - TAIL_BYTES, 0), TAIL_BYTES)
    try:
        location = find_table(tail, size)
        if location is None or is_of_inner_zip(head, location):
            raise SourceError(f"{file} {why_without_table(file, head)}")
        if location.size > MAX_INDEX_BYTES:
            needs = f"its table of contents needs {location.size:,} bytes, more than {MAX_INDEX_BYTES:,}"
            raise SourceError(f"{file}: {needs}")
        index = index_of(read_entries(file, location))
    except (BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # a network error, not a fault of the zip
            raise
        raise SourceError(f"{file} is not a zip that can be read: {error}") from None
    file.refuse_changed()
    return index._replace(is_misplaced=misplaced_members(index.rows, location.start))


def why_without_table(file: File, head: bytes) -> str:
    """Say what is wrong with a file that has no table of contents of its own."""
    if head == MEMBER_MAGIC:
        recover = shlex.join(["zip", "-FF", str(file), "--out", "mended.zip"])
        return (
            "starts as a zip, but the index at its end is missing: it was cut short or is still being written; "
            f"wait for it, copy it again, or recover its contents: {recover}"
        )
    return f"is {'neither a zip nor a tar' if head else 'empty'}; expected a folder, a zip or a tar of images"


def is_of_inner_zip(head: bytes, location: TableLocation) -> bool:
    """Return whether the table belongs to a zip stored inside this zip, whose own table was cut off.

    Such a table is not where its end record says. That is also true of a zip appended to a program, but this file
    starts with a member.
    """
    return head == MEMBER_MAGIC and location.stated not in (location.start, ZIP64)


def find_table(tail: bytes, file_size: int) -> TableLocation | None:
    """Find the table of contents from the last TAIL_BYTES of a file; None if there is no end record."""
    end = tail.rfind(END_MAGIC, max(len(tail) - END.size - MAX_COMMENT_BYTES, 0))
    if end < 0 or end + END.size > len(tail):
        return None
    size, stated, _ = END.unpack_from(tail, end)
    start, offset = end, stated
    if start >= LOCATOR64.size:
        magic, disk, disks = LOCATOR64.unpack_from(tail, start - LOCATOR64.size)
        before = start - LOCATOR64.size - END64.size
        if magic == LOCATOR64_MAGIC and (disk or disks > 1):
            raise BadZipFile("zips that span several disks are not read")
        if magic == LOCATOR64_MAGIC and before >= 0 and tail.startswith(END64_MAGIC, before):
            start = before
            _, size, offset = END64.unpack_from(tail, before)
    shift = file_size - len(tail) + start - size - offset
    if offset + shift < 0:
        raise BadZipFile("Bad offset for central directory")
    return TableLocation(offset + shift, size, shift, stated)


def read_entries(file: File, location: TableLocation) -> Iterator[tuple[str, bytes]]:
    """Yield each member's name and packed ROW, except folders; raise BadZipFile if the table is damaged."""
    left = location.size
    with file.reopen() as stream:
        stream.seek(location.start)
        while left > 0:
            entry = stream.read(min(ENTRY.size, left))
            if len(entry) < ENTRY.size:
                raise BadZipFile("Truncated central directory")
            if not entry.startswith(ENTRY_MAGIC):
                raise BadZipFile("Bad magic number for central directory")
            version, flags, method, crc, packed, size, *lengths, attributes, offset = ENTRY.unpack(entry)
            rest = stream.read(min(sum(lengths), left - ENTRY.size))
            if version > NEWEST_VERSION:
                raise BadZipFile(f"zip file version {version / 10}")
            extra = rest[lengths[0] : lengths[0] + lengths[1]]
            size, packed, offset = with_zip64(extra, size, packed, offset)
            left -= ENTRY.size + sum(lengths)
            offset, is_link = min(max(offset + location.shift, -1), LARGEST_OFFSET), stat.S_ISLNK(attributes >> 16)
            if not (name := decode_name(rest[: lengths[0]], flags)).endswith("/"):
                yield name, ROW.pack(offset, packed, size, crc, method, flags, lengths[0], is_link)


def with_zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Return the three numbers; take those too large for the entry from the zip64 extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if length + 4 > len(extra):
            raise BadZipFile(f"Corrupt extra field {kind:04x} (size={length})")
        if kind == ZIP64_FIELD:
            numbers = struct.iter_unpack("<Q", extra[4 : 4 + length - length % 8])
            try:
                size = next(numbers)[0] if size in (ZIP64, ZIP64_SIZE) else size
                packed = next(numbers)[0] if packed == ZIP64 else packed
                offset = next(numbers)[0] if offset == ZIP64 else offset
            except StopIteration:
                raise BadZipFile("Corrupt zip64 extra field") from None
        extra = extra[4 + length :]
    return size, packed, offset


def decode_name(name: bytes, flags: int) -> str:
    """Decode a member's name up to a zero byte; bytes that are wrongly marked as UTF-8 become surrogates."""
    text = name.decode("utf-8", "surrogateescape") if flags & UTF8 else name.decode("cp437")
    return text.partition("\0")[0]


def misplaced_members(rows: bytes | NDArray[np.uint8], end: int) -> NDArray[np.bool_]:
    """Mark members that share bytes or lie outside [0, end): with them a small zip could unpack to any size."""
    table = np.frombuffer(rows, ROW_TYPE)
    order = np.argsort(table["f0"], kind="stable")
    starts = table["f0"][order]
    stops = starts + LOCAL_HEADER.size + np.minimum(table["f1"][order], LARGEST_OFFSET).astype(np.int64)
    if (starts[:1] >= 0).all() and (stops[:-1] <= starts[1:]).all() and (stops[-1:] <= end).all():
        return np.zeros(len(order), bool)
    is_inside = stops <= end
    reached = np.maximum.accumulate(np.where(is_inside, stops, 0))  # how far the members up to each one reach
    before = np.concatenate([[0], reached[:-1]])
    places = np.arange(len(order))
    last = np.maximum.accumulate(np.where(is_inside & (stops > before), places, -1))  # the member that reaches that far
    overlaps = (starts >= 0) & is_inside & (starts < before)
    is_misplaced = (starts < 0) | ~is_inside | overlaps
    is_misplaced[last[places[overlaps] - 1]] = True
    found = np.empty(len(order), bool)
    found[order] = is_misplaced
    return found
