"""A zip's table of contents, read in one pass: a row of numbers for each member.

It is what `zipfile` reads and refuses, without its kilobyte of objects for each member.
"""

import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_store.storage.verbs import File

MEMBER_MAGIC, ENTRY_MAGIC, END_MAGIC = b"PK\3\4", b"PK\1\2", b"PK\5\6"
"""First bytes of a member, of its entry in the table, and of the record at the end that says where the table is."""

MAGIC_BYTES = 4

END = struct.Struct("<12xLLH")
"""Of that record: bytes of the table, its place, bytes of the comment that follows."""

END64, LOCATOR64 = struct.Struct("<4s36xQQ"), struct.Struct("<4sL8xL")
"""The two records before it in large zips, of which the second says on how many disks the zip is."""
END64_MAGIC, LOCATOR64_MAGIC = b"PK\6\6", b"PK\6\7"

TAIL_BYTES = END64.size + LOCATOR64.size + END.size + 2**16
"""At the end of a zip: the three records, and the longest comment."""

ENTRY = struct.Struct("<6xBxHH4xLLLHHH4xLL")
"""An entry: the version that can read it; flags, method; CRC-32, bytes packed and whole; bytes of name, extra fields
and comment; attributes; place.
"""

NEWEST_VERSION = 63
"""Of the format, as of 2006: 6.3."""

UTF8 = 1 << 11
"""Flag: the name is UTF-8."""

ZIP64, ZIP64_SIZE = 2**32 - 1, 2**64 - 1
"""In place of a number that is in the extra field of this kind:"""
ZIP64_FIELD = 1

LARGEST = 2**61
"""Places further behind are the same: outside of the archive."""

LOCAL_HEADER_BYTES = 30

ROW = struct.Struct("<qQQLHHH?")
ROW_TYPE = np.dtype("<i8, <u8, <u8, <u4, <u2, <u2, <u2, ?")


class BadIndexError(Exception):
    """What is wrong with a zip's table of contents."""


class Place(NamedTuple):
    """Where a table of contents lies."""

    start: int
    size: int
    shift: int
    """Bytes before the zip in its file, as of a program that unpacks it."""
    said: int
    """The place that the last record says."""


class ZipMember(NamedTuple):
    """In the order of ROW."""

    offset: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int
    name_bytes: int
    is_link: bool


def find_index(tail: bytes, file_size: int) -> Place | None:
    """Look in the last TAIL_BYTES of a file; None where no record says where its table of contents is."""
    end = tail.rfind(END_MAGIC, max(len(tail) - END.size - 2**16, 0))
    if end < 0 or end + END.size > len(tail):
        return None
    size, said, _ = END.unpack_from(tail, end)
    start, offset = end, said
    if start >= LOCATOR64.size:
        magic, disk, disks = LOCATOR64.unpack_from(tail, start - LOCATOR64.size)
        before = start - LOCATOR64.size - END64.size
        if magic == LOCATOR64_MAGIC and (disk or disks > 1):
            raise BadIndexError("zips that span several disks are not read")
        if magic == LOCATOR64_MAGIC and before >= 0 and tail[before : before + MAGIC_BYTES] == END64_MAGIC:
            start = before
            _, size, offset = END64.unpack_from(tail, before)
    shift = file_size - len(tail) + start - size - offset
    if offset + shift < 0:
        raise BadIndexError("Bad offset for central directory")
    return Place(offset + shift, size, shift, said)


def read_entries(file: File, place: Place) -> Iterator[tuple[str, bytes]]:
    """Each member's name and its ROW, folders too; BadIndexError where the table is damaged."""
    left = place.size
    with file.reopen() as stream:
        stream.seek(place.start)
        while left > 0:
            entry = stream.read(min(ENTRY.size, left))
            if len(entry) < ENTRY.size:
                raise BadIndexError("Truncated central directory")
            if not entry.startswith(ENTRY_MAGIC):
                raise BadIndexError("Bad magic number for central directory")
            version, flags, method, crc, packed, size, *lengths, attributes, offset = ENTRY.unpack(entry)
            rest = stream.read(min(sum(lengths), left - ENTRY.size))
            if version > NEWEST_VERSION:
                raise BadIndexError(f"zip file version {version / 10}")
            extra = rest[lengths[0] : lengths[0] + lengths[1]]
            size, packed, offset = with_zip64(extra, size, packed, offset)
            left -= ENTRY.size + sum(lengths)
            offset, is_link = min(max(offset + place.shift, -1), LARGEST), stat.S_ISLNK(attributes >> 16)
            row = ROW.pack(offset, packed, size, crc, method, flags, lengths[0], is_link)
            yield name_of(rest[: lengths[0]], flags), row


def with_zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers, as the extra fields say them where they are too large for the entry."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if length + 4 > len(extra):
            raise BadIndexError(f"Corrupt extra field {kind:04x} (size={length})")
        if kind == ZIP64_FIELD:
            numbers = struct.iter_unpack("<Q", extra[4 : 4 + length - length % 8])
            try:
                size = next(numbers)[0] if size in (ZIP64, ZIP64_SIZE) else size
                packed = next(numbers)[0] if packed == ZIP64 else packed
                offset = next(numbers)[0] if offset == ZIP64 else offset
            except StopIteration:
                raise BadIndexError("Corrupt zip64 extra field") from None
        extra = extra[4 + length :]
    return size, packed, offset


def name_of(name: bytes, flags: int) -> str:
    """A member's name, up to a zero byte; bytes that are not the UTF-8 they are marked as become surrogates."""
    text = name.decode("utf-8", "surrogateescape") if flags & UTF8 else name.decode("cp437")
    return text.partition("\0")[0]


def misplaced_members(rows: bytes | NDArray[np.uint8], end: int) -> NDArray[np.bool_]:
    """Members that do not have bytes of their own before `end`: with them, a small zip unpacks to any size."""
    table = np.frombuffer(rows, ROW_TYPE)
    order = np.argsort(table["f0"], kind="stable")
    starts = table["f0"][order]
    stops = starts + LOCAL_HEADER_BYTES + np.minimum(table["f1"][order], LARGEST).astype(np.int64)
    if (starts[:1] >= 0).all() and (stops[:-1] <= starts[1:]).all() and (stops[-1:] <= end).all():
        return np.zeros(len(order), bool)
    is_inside = stops <= end
    reached = np.maximum.accumulate(np.where(is_inside, stops, 0))
    """How far those up to each one reach."""
    before = np.concatenate([[0], reached[:-1]])
    places = np.arange(len(order))
    last = np.maximum.accumulate(np.where(is_inside & (stops > before), places, -1))
    """The one that reaches so far."""
    overlaps = (starts >= 0) & is_inside & (starts < before)
    is_misplaced = (starts < 0) | ~is_inside | overlaps
    is_misplaced[last[places[overlaps] - 1]] = True
    found = np.empty(len(order), bool)
    found[order] = is_misplaced
    return found
