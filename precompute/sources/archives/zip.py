"""Images in a zip, stored or deflated: zipfile reads the index alone; members are read and checked here."""

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, cast

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.sources.archives.archive import Archive, damaged
from precompute.sources.place import DAMAGED, HEADER_BYTES, Place, refuse_large

MEMBER_MAGIC = b"PK\3\4"

HEADER = struct.Struct("<4s22xHH")
"""A member's header: magic, length of the name, length of extra fields."""

EXTRA_BYTES = 64
"""Bytes of extra fields to read with a member, mostly too many; its header has the true number."""

ENCRYPTED = 1 | 1 << 5 | 1 << 6
"""Flags of encrypted data; the second is that of a patch to other data."""

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Others can pack a gigabyte into a kilobyte, and images are not stored that way."""

MAX_INDEX_BYTES = 2**30
"""Largest index that is read: 10 million members."""

INDEX_ERRORS = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError, struct.error)
"""Errors that zipfile raises for an index that is truncated, damaged or wrong."""


class ZipIndexStream:
    """The zip's stream for zipfile, which trusts the lengths in the zip: reads are bounded."""

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
    def _members(self) -> Iterable[tuple[str, Place]]:
        with self._file.reopen() as opened:
            stream = ZipIndexStream(opened, str(self._file))
            try:
                table = zipfile.ZipFile(cast("IO[bytes]", stream))
            except INDEX_ERRORS as error:
                raise stream.failed or SourceError(f"{self._file} {why_without_index(self._file, error)}") from None
        self._file.refuse_changed()
        return ((each.filename, place_of(each)) for each in table.infolist() if not each.is_dir())

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
        data = self._file.part(place.offset, HEADER.size + len(name) + EXTRA_BYTES + place.length)
        if not data.startswith(MEMBER_MAGIC) or len(data) < HEADER.size:
            raise damaged(name, f"no member begins at byte {place.offset:,}")
        start = HEADER.size + sum(HEADER.unpack_from(data)[1:])
        if (stop := start + place.length) > len(data):
            data += self._file.part(place.offset + len(data), stop - len(data))
        return data[start:stop]


def place_of(member: zipfile.ZipInfo) -> Place:
    problem = why_unreadable(member)
    return Place(
        offset=member.header_offset,
        length=member.compress_size,
        size=member.file_size,
        crc32=member.CRC,
        deflated=member.compress_type == zipfile.ZIP_DEFLATED,
        problem=problem and f"{DAMAGED}: {member.filename}: {problem}",
    )


def why_unreadable(member: zipfile.ZipInfo) -> str | None:
    if stat.S_ISLNK(member.external_attr >> 16):
        return "is a link"
    if member.compress_type not in METHODS:
        return f"is compressed by method {member.compress_type}; stored and deflate are read"
    if member.flag_bits & ENCRYPTED:
        return "is encrypted"
    return "lies before the archive" if member.header_offset < 0 else None


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


def why_without_index(file: File, error: Exception) -> str:
    if (head := file.part(0, len(MEMBER_MAGIC))) == MEMBER_MAGIC:
        return f"starts as a zip, but its index cannot be read ({error}): it was cut short; copy it again"
    return f"is {'neither a zip nor a tar' if head else 'empty'}; expected a folder, a zip or a tar of images"
