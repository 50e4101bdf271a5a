"""Images in an uncompressed tar, read in place by offset.

Headers are read here and not by tarfile, which takes three times as long and trusts them. Links, sparse files and
devices are rejected alone; a tar whose headers cannot be followed to its end is refused.
"""

import io
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.sources.archives.archive import Archive, damaged
from precompute.sources.listing import as_posix
from precompute.sources.place import DAMAGED, HEADER_BYTES, PartStream, Place, refuse_large

BLOCK = 512
"""Bytes of a header; files are filled up to whole blocks."""

CHECKSUM = slice(148, 156)
"""Place of a header's checksum, in which these bytes themselves count as spaces."""

LONG_NAME, PAX, IGNORED = b"L", b"xX", b"Kg"
"""Kinds of headers before a file's own: its name, its fields; and a link's target, or fields of all files."""

REGULAR, FOLDER, LINKS, WITHOUT_DATA = b"\0" + b"07", b"5", b"12", b"123456"

MAX_EXTENDED_BYTES = 16 * 2**10
"""Largest name or fields before a file's header: twice the longest path."""

TEXT_SUFFIXES = (".txt", ".json")

KEPT_TEXT_BYTES = 64 * 2**10
"""Largest text that is kept in memory on the way over the headers, until it is read; most take a kilobyte."""

MOST_KEPT = 2**16


def read_headers(file: File, texts: dict[int, bytes]) -> Iterator[tuple[str, Place]]:
    """Yield the name and place of every member except folders; put small texts into `texts`, by offset.

    Raises SourceError unless all headers are sound.
    """
    offset, fields = 0, dict[str, str]()
    with file.reopen() as stream:
        try:
            while (header := read_at(stream, offset, BLOCK)) != bytes(BLOCK):
                name, size, kind = parse_header(header)
                size = int(fields.get("size", size))
                data, place = offset + BLOCK, Place(offset=offset, length=size, size=size, crc32=zlib.crc32(header))
                offset = data + (0 if kind in WITHOUT_DATA else -(-size // BLOCK) * BLOCK)
                if size < 0 or offset > file.version.size:
                    raise ValueError(f"a file of {size:,} bytes")
                if kind in IGNORED:
                    continue
                if kind in LONG_NAME + PAX:
                    if size > MAX_EXTENDED_BYTES:
                        raise ValueError(f"a header of {size:,} bytes, more than {MAX_EXTENDED_BYTES:,},")
                    fields |= parse_extended(kind, read_at(stream, data, size))
                    continue
                name = fields.get("path", name)
                if kind not in FOLDER and not name.endswith("/"):
                    name = as_posix(name)
                    if problem := why_no_file(kind, fields):
                        place = Place(offset=place.offset, problem=f"{DAMAGED}: {name}: {problem}")
                    elif name.endswith(TEXT_SUFFIXES) and size <= KEPT_TEXT_BYTES and len(texts) < MOST_KEPT:
                        texts[place.offset] = read_at(stream, data, size)
                    yield name, place
                fields = {}
        except ValueError as error:
            raise SourceError(f"{file} is damaged, cut short or no tar: {error} at byte {offset:,}") from None
    file.refuse_changed()


def read_at(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset)
    if len(data := stream.read(size)) < size:
        raise ValueError("no end mark")
    return data


def parse_header(header: bytes) -> tuple[str, int, bytes]:
    if number_of(header[CHECKSUM]) != sum(header) - sum(header[CHECKSUM]) + 8 * ord(" "):
        raise ValueError("no header")
    name = text_of(header[:100])
    if header[257:263] == b"ustar\0" and (folder := text_of(header[345:500])):
        name = f"{folder}/{name}"
    return name, number_of(header[124:136]), header[156:157]


def number_of(field: bytes) -> int:
    """Read octal digits, or, for large numbers, bytes after 0x80."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def text_of(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def parse_extended(kind: bytes, data: bytes) -> dict[str, str]:
    if kind in LONG_NAME:
        return {"path": text_of(data)}
    fields = dict[str, str]()
    while data.rstrip(b"\0"):
        if (length := int(data.partition(b" ")[0][:8])) < len("5 a=\n"):
            raise ValueError("a field of no length")
        record, data = data[:length], data[length:]
        key, _, value = os.fsdecode(record.partition(b" ")[2].removesuffix(b"\n")).partition("=")
        fields[key] = value
    return fields


def why_no_file(kind: bytes, fields: dict[str, str]) -> str | None:
    if kind in LINKS:
        return "is a link"
    if kind in b"S" or any(name.startswith("GNU.sparse.") for name in fields):
        return "is a sparse file"
    return None if kind in REGULAR else "is not a file"


class ImageTar(Archive):
    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._texts: dict[int, bytes] = {}
        """Small texts that were read with the headers, by offset."""

    def _members(self) -> Iterable[tuple[str, Place]]:
        return read_headers(self._file, self._texts)

    def _fingerprint(self, place: Place) -> str:
        """Return the CRC-32 of the header, which has size and time, and the version of the tar."""
        return f"{super()._fingerprint(place)}:{self._file.version.mark}"

    def _read_at(self, name: str, place: Place) -> bytes:
        refuse_large(name, place.size)
        if (text := self._texts.get(place.offset)) is not None:
            return text
        data = self._file.part(place.offset, BLOCK + place.size)
        if zlib.crc32(data[:BLOCK]) != place.crc32 or len(data) != BLOCK + place.size:
            raise damaged(name, f"its header is not at byte {place.offset:,}")
        return data[BLOCK:]

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        if place is None or place.problem or zlib.crc32(self._file.part(place.offset, BLOCK)) != place.crc32:
            return io.BytesIO(self.read(name, place))  # the tar was written again, or the index says what is wrong
        return PartStream(self._file, place.offset + BLOCK, place.size)

    def _head_at(self, name: str, place: Place) -> bytes:
        return self._file.part(place.offset + BLOCK, min(place.size, HEADER_BYTES))


def is_tar(name: str, head: bytes) -> bool:
    """Recognise POSIX and GNU tars by their magic, and the oldest tars, which have none, by the suffix `.tar`."""
    return head[257:262] == b"ustar" or name.lower().endswith(".tar")
