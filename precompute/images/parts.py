"""Refuse files that would cost far more than their size and their pixel count say.

Pillow takes a microsecond and hundreds of bytes for each part of a file (a chunk, a segment, a block, an entry of a
directory), and for a GIF and a WebP the memory of the pixels when it opens the file. Every scan of a JPEG goes over the
whole image again; a TIFF's tile may be larger than its image. So Pillow's reads are counted, and claims are looked up.
"""

import io
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal

from PIL import GifImagePlugin, Image

from precompute.images.rejected import Rejected, refuse_many_pixels

MAX_PARTS = 100_000
"""Parts of one file: a second and 40 MB at most. A PNG of 256 MiB in chunks of 4 KB, or a TIFF of 100,000 strips of one
row, still fits.
"""
READS_OF_A_PART = 4
BYTES_OF_A_READ = 4
"""Reads of one byte that cost as a larger one does. Pillow reads a BMP's run lengths byte by byte: 1.6 MB at most."""

MAX_SCANS = 100
"""Scans of one JPEG. Progressive files have about ten; libtiff has the same bound."""

MAX_EXIF_BYTES = 2**20
"""EXIF is at most 64 KB by its standard; Pillow joins several segments of it."""

MAX_AVIF_HEADER = 2**18
"""Bytes of an AVIF's items, or of its frames' list; 512 tiles need 30 KB. libavif searches all items for each item."""

JPEG_MAGIC = b"\xff\xd8"
JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""Markers that can end a scan's data; stuffed bytes and restart markers cannot. No repetition: the search is linear."""
SOI, EOI, SOS, APP1, TEM = 0xD8, 0xD9, 0xDA, 0xE1, 0x01

JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1, 0xC9})
FRAME_COMPONENTS, SCAN_COMPONENTS = 7, 2
"""Offsets of the component count in a segment, from its length field on."""

TIFF_MAGICS = frozenset({b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"})
TIFF_BYTE_LIKE = frozenset({1, 2, 7})
"""BYTE, ASCII, UNDEFINED: kept as bytes, not as a tuple of numbers."""
TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
TILE_SIDES = frozenset({322, 323})

AVIF_BRANDS, HEIF_BRANDS = frozenset({b"avif", b"avis"}), frozenset({b"mif1", b"msf1"})
"""Pillow passes a file that begins with one of these brands to libavif."""
AVIF_FRAME_COUNT = re.compile(rb"stsz.{8}(.{4})", re.DOTALL)

FARTHEST = 2**62


def too_many_parts() -> Rejected:
    return Rejected("too many parts", f"more than {MAX_PARTS:,} chunks, segments, blocks or tag values")


class CountedFile(io.BytesIO):
    """A file in memory; a read raises Rejected once there have been too many."""

    _cost = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._cost += 1 if size == 1 else BYTES_OF_A_READ
        if self._cost > MAX_PARTS * READS_OF_A_PART * BYTES_OF_A_READ:
            raise too_many_parts()
        return super().read(size)


class FirstFrameOfGif(GifImagePlugin.GifImageFile):
    """A GIF without the area to restore after its first frame, which Pillow allocates when it opens the file."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, 0 if name == "disposal_method" else value)


GIF = "FIRST FRAME OF GIF"
Image.register_open(GIF, FirstFrameOfGif, lambda prefix: prefix.startswith((b"GIF87a", b"GIF89a")))


def refuse_costly(data: bytes, max_pixels: int) -> None:
    """Raise Rejected for a cost that Pillow's reads do not show; most broken files pass."""
    if data.startswith(JPEG_MAGIC):
        refuse_many_scans(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        refuse_many_pixels(*webp_size(data), max_pixels)
    elif data[:4] in TIFF_MAGICS:
        refuse_costly_directory(data, max_pixels)
    elif data[4:8] == b"ftyp" and data[8:12] in AVIF_BRANDS | HEIF_BRANDS:
        refuse_costly_boxes(data)


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield each segment's marker, and where its length field is; two markers have none."""
    position = len(JPEG_MAGIC)
    while (match := JPEG_MARKER.search(data, position)) and (marker := data[match.end() - 1]) != EOI:
        position = match.end()
        yield marker, position
        if marker not in (SOI, TEM):
            position += max(int.from_bytes(data[position : position + 2], "big"), 2)


def refuse_many_scans(data: bytes) -> None:
    """Raise Rejected for a JPEG of too many scans or segments, or too much EXIF.

    After a first scan with all components of a sequential image, libjpeg reads the rest at most once, so that it is not
    searched; that would take longer than all other checks.
    """
    scans = exif_bytes = 0
    frames = list[bytes]()
    for number, (marker, begin) in enumerate(jpeg_segments(data)):
        if marker in JPEG_FRAMES:
            components = begin + FRAME_COMPONENTS
            frames.append(data[components : components + 1] if marker in SEQUENTIAL_FRAMES else b"")
        elif marker == SOS:
            if frames == [data[begin + SCAN_COMPONENTS : begin + SCAN_COMPONENTS + 1]]:
                return
            scans += 1
        elif marker == APP1 and data.startswith(b"Exif", begin + 2):
            exif_bytes += int.from_bytes(data[begin : begin + 2], "big")
        if scans > MAX_SCANS or exif_bytes > MAX_EXIF_BYTES:
            raise Rejected("too many parts", f"more than {MAX_SCANS} scans or {MAX_EXIF_BYTES:,} bytes of EXIF")
        if number > MAX_PARTS:
            raise too_many_parts()


def webp_size(data: bytes) -> tuple[int, int]:
    """Return the size of a WebP's canvas; zeros if its first chunk does not state it."""
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if data[12:16] == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


def refuse_costly_directory(data: bytes, max_pixels: int) -> None:
    """Raise Rejected if a TIFF's first directory has too many values or too large tiles; the others are never read."""
    if data[:4] == b"MM\0+":
        raise Rejected("cannot decode", "Pillow and libtiff read a big-endian BigTIFF differently")
    name: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"
    order = "<" if name == "little" else ">"
    first, head, entry = (8, "Q", "HHQ8s") if data[2:3] == b"+" else (4, "H", "HHL4s")
    values, tile_pixels = 0, 1
    try:
        (start,) = struct.unpack_from(order + entry[2], data, first)
        (entries,) = struct.unpack_from(order + head, data, min(start, len(data)))
        begin, step = start + struct.calcsize(head), struct.calcsize(order + entry)
        for place in range(begin, begin + len(data), step)[:entries]:
            tag, kind, count, value = struct.unpack_from(order + entry, data, place)
            size = TIFF_SIZES.get(kind, 0)
            if count * size > len(value) and int.from_bytes(value, name) + count * size > len(data):
                raise struct.error("its value lies beyond the file")
            values += 1 if kind in TIFF_BYTE_LIKE or not size else 1 + count
            if tag in TILE_SIDES:
                is_here = count == 1 and size <= len(value)
                tile_pixels *= max(int.from_bytes(value[:size], name), 1) if is_here else max_pixels + 1
            if values > MAX_PARTS:
                raise too_many_parts()
    except struct.error:  # Pillow would go on without the missing tags, such as the orientation
        raise Rejected("cannot decode", "its directory is cut short") from None
    if tile_pixels > max_pixels:
        raise Rejected("too large", f"tiles of more than {max_pixels:,} pixels")


def refuse_costly_boxes(data: bytes) -> None:
    """Raise Rejected for an AVIF of too many boxes, items or frames; libavif takes memory for every frame."""
    file = io.BytesIO(data)
    for number, (size, kind) in enumerate(boxes(file)):
        if kind in (b"meta", b"moov") and size > MAX_AVIF_HEADER:
            raise Rejected("too many parts", f"a table of items of more than {MAX_AVIF_HEADER:,} bytes")
        counts = AVIF_FRAME_COUNT.findall(file.read(size)) if kind == b"moov" else []
        if number + sum(int.from_bytes(each, "big") for each in counts) > MAX_PARTS:
            raise too_many_parts()


def boxes(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the size and the name of each box of ISO media at the top level; the file is then at its content."""
    place = 0
    while True:
        file.seek(place)
        if len(head := file.read(16)) < 8:
            return
        size, length = int.from_bytes(head[:4], "big"), 8
        if size == 1:
            size, length = int.from_bytes(head[8:], "big"), 16
        file.seek(place + length)
        if 0 < size < length or place + size >= FARTHEST:
            return
        yield (size - length if size else FARTHEST), head[4:8]
        if not size:  # the box lasts until the file ends
            return
        place += size
