"""Count the parts of an image file before Pillow walks them in Python.

A pixel count does not bound the work in a file: empty chunks, comments and strip offsets cost a decoder a microsecond
and hundreds of bytes of memory each, every scan of a JPEG goes over the whole image once more, and a TIFF's tile may be
larger than its image. So the parts are counted first, at the cost of a few lookups in an honest file.
"""

import re
import struct
from collections.abc import Callable, Iterator

from precompute.images.box_parts import avif_parts, j2k_parts, jp2_parts
from precompute.images.rejected import Rejected

MAX_PARTS = 100_000
"""Chunks, segments, blocks or tag values of one file: 0.2 s and 40 MB at most. A PNG of 256 MiB in chunks of 4 KB, or
a TIFF of 100,000 strips of one row, still fits.
"""

MAX_SCANS = 100
"""Scans of one JPEG. Progressive files have about ten; libtiff has the same bound."""

MAX_EXIF_BYTES = 2**20
"""EXIF is at most 64 KB by its standard; Pillow joins several segments of it."""

JPEG_MAGIC = b"\xff\xd8"
JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""Markers that can end a scan's data; stuffed bytes and restart markers cannot. No repetition: the search is linear."""
SOI, EOI, SOS, APP1, APP13, TEM = 0xD8, 0xD9, 0xDA, 0xE1, 0xED, 0x01
UNSIZED = frozenset({SOI, EOI, TEM})

JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
DCT_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})
"""Sequential and progressive frames, with either entropy code."""
SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1, 0xC9})
FRAME_COMPONENTS, SCAN_COMPONENTS = 7, 2
"""Offsets of the component count in a segment, from its length field on."""

GIF_EXTENSION, GIF_IMAGE, GIF_END = 0x21, 0x2C, 0x3B

BMP_COMPRESSION, BMP_RUN_LENGTHS = slice(30, 34), frozenset({b"\1\0\0\0", b"\2\0\0\0"})
BMP_PART_BYTES = 160
"""Bytes in run lengths that cost as much as one part; 100,000 parts are 16 MB, which take Pillow 6 s."""

TIFF_BYTE_LIKE = frozenset({1, 2, 7})
"""BYTE, ASCII, UNDEFINED: kept as bytes, not as a tuple of numbers."""
TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of a value, by type."""
TIFF_NUMBERS = {3: "H", 4: "L", 13: "L", 16: "Q", 18: "Q"}
"""SHORT, LONG, IFD, LONG8, IFD8: the types that a tile's size or a directory's offset may have."""
TIFF_SUBDIRECTORIES = frozenset({34665, 34853, 40965})
"""EXIF, GPS, interoperability."""
TILE_WIDTH, TILE_LENGTH = 322, 323


def refuse_costly(data: bytes, max_pixels: int) -> None:
    """Raise Rejected for a file that would cost far more to decode than its size and pixel count say.

    Most broken files pass: the decoders refuse those.
    """
    for magic, parts in PARTS.items():
        if data.startswith(magic, 4 if magic == b"ftyp" else 0):
            count = 0
            for found in parts(data, max_pixels):
                count += found
                if count > MAX_PARTS:
                    raise Rejected("too many parts", f"more than {MAX_PARTS:,} chunks, segments, blocks or tag values")
            return


def jpeg_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count segments and Photoshop's resources; before the first scan also stray bytes, which Pillow skips one by one.

    If the first scan of a sequential image has all components, it is the only one, and libjpeg reads the rest of the
    file at most once. So the rest is not searched; that would take longer than all other checks together.
    """
    scans = exif_bytes = position = 0
    frames = list[bytes]()
    while match := JPEG_MARKER.search(data, position):
        end = match.end()
        marker = data[end - 1]
        yield 1 if scans else end - position - 1
        position = end
        if marker in UNSIZED:
            if marker == EOI:
                return
            continue
        if marker in JPEG_FRAMES:
            is_sequential = marker in SEQUENTIAL_FRAMES
            frames.append(byte_at(data, position + FRAME_COMPONENTS) if is_sequential else b"")
        elif marker == SOS:
            if frames == [byte_at(data, position + SCAN_COMPONENTS)]:
                return
            scans += 1
        length = int.from_bytes(data[position : position + 2], "big")
        if marker == APP13:
            yield data.count(b"8BIM", position, position + length)
        elif marker == APP1 and data.startswith(b"Exif", position + 2):
            exif_bytes += length
        if scans > MAX_SCANS or exif_bytes > MAX_EXIF_BYTES:
            raise Rejected("too many parts", f"more than {MAX_SCANS} scans or {MAX_EXIF_BYTES:,} bytes of EXIF")
        position += max(length, 2)
    yield 0 if scans else max(0, len(data) - position)


def byte_at(data: bytes, place: int) -> bytes:
    """Return the byte at `place`; empty beyond the file's end."""
    return data[place : place + 1]


def is_dct_jpeg(data: bytes) -> bool:
    """Return whether libjpeg can reduce a JPEG: it cannot reduce a lossless one."""
    position = len(JPEG_MAGIC)
    while match := JPEG_MARKER.search(data, position):
        marker, position = data[match.end() - 1], match.end()
        if marker in JPEG_FRAMES:
            return marker in DCT_FRAMES
        position += int.from_bytes(data[position : position + 2], "big")
    return False


def png_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    is_whole = False
    for number, (kind, begin) in enumerate(png_chunks(data)):
        if (kind == b"IHDR") != (number == 0):  # Pillow accepts it anywhere and uses the last one
            raise Rejected("cannot decode", "IHDR is not the first of its chunks, or one of several")
        is_whole = kind == b"IEND" and begin + 4 <= len(data)  # with its crc32
        yield 1
    if not is_whole:  # Pillow accepts a file without it
        raise Rejected("cannot decode", "cut short: its last chunk, IEND, is missing or not whole")


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the type of each chunk up to the end of the image, and where its content begins."""
    position, kind = 8, b""
    while position + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, position + 8
        position += length + 12  # length, type, crc32


def gif_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count the blocks before the first frame; blocks of pixels are read in C."""
    flags = int.from_bytes(data[10:11], "big")
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # after the palette
    while position + 1 < len(data) and data[position] not in (GIF_IMAGE, GIF_END):
        yield 1
        if data[position] != GIF_EXTENSION:
            position += 1
            continue
        position += 2
        while position < len(data) and data[position]:
            position += data[position] + 1
            yield 1
        position += 1


def bmp_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count bytes of a file in run lengths, which Pillow reads one by one, as parts of the same cost."""
    if data[BMP_COMPRESSION] in BMP_RUN_LENGTHS:
        yield len(data) // BMP_PART_BYTES


def tiff_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count entries and their values in the first directory and those below it; the others are never read."""
    if data[:4] == b"MM\0+":
        raise Rejected("cannot decode", "Pillow and libtiff read a big-endian BigTIFF differently")
    order, is_big = "<" if data[:2] == b"II" else ">", data[2] == ord("+")
    first = int.from_bytes(data[8:16] if is_big else data[4:8], "little" if order == "<" else "big")
    waiting, seen = [first], {first}
    while waiting:
        offset, tile_pixels = waiting.pop(), 1
        try:
            for tag, kind, count, value in tiff_entries(data, offset, order, is_big):
                number = tiff_number(order, kind, count, value)
                yield 1 if kind in TIFF_BYTE_LIKE or count > len(data) else 1 + count
                if tag in (TILE_WIDTH, TILE_LENGTH):
                    tile_pixels *= max_pixels + 1 if number is None else number
                if tag in TIFF_SUBDIRECTORIES and number is not None and number not in seen:
                    waiting.append(number)
                    seen.add(number)
        except struct.error:
            if offset == first:  # Pillow would go on without the missing tags, such as the orientation
                raise Rejected("cannot decode", "its directory is cut short") from None
        if tile_pixels > max_pixels:
            raise Rejected("too large", f"tiles of more than {max_pixels:,} pixels")


def tiff_entries(data: bytes, offset: int, order: str, is_big: bool) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield tag, type, number of values, and the value or its offset; raise struct.error if the file ends before it."""
    head, entry = ("Q", "HHQ8s") if is_big else ("H", "HHL4s")
    (count,) = struct.unpack_from(order + head, data, min(offset, len(data)))
    step = struct.calcsize(order + entry)
    for place in range(offset + struct.calcsize(order + head), offset + len(data), step)[:count]:
        tag, kind, values, value = struct.unpack_from(order + entry, data, place)
        size = values * TIFF_SIZES.get(kind, 0)
        if size > len(value) and int.from_bytes(value, "little" if order == "<" else "big") + size > len(data):
            raise struct.error("its value lies beyond the file")
        yield tag, kind, values, value


def tiff_number(order: str, kind: int, count: int, value: bytes) -> int | None:
    """Return the entry's value if it is one whole number, else None."""
    form = f"{order}{TIFF_NUMBERS.get(kind, 's')}"
    if count != 1 or kind not in TIFF_NUMBERS or struct.calcsize(form) > len(value):
        return None
    (number,) = struct.unpack_from(form, value)
    return int(number)


PARTS: dict[bytes, Callable[[bytes, int], Iterator[int]]] = {
    JPEG_MAGIC: jpeg_parts,
    b"\x89PNG\r\n\x1a\n": png_parts,
    b"GIF8": gif_parts,
    b"BM": bmp_parts,
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"), tiff_parts),
    b"\0\0\0\x0cjP  \r\n\x87\n": jp2_parts,
    b"\xff\x4f\xff\x51": j2k_parts,
    b"ftyp": avif_parts,
}
"""Counters by a file's first bytes (`ftyp`: from the fifth byte on); these are all the bytes that Pillow accepts for
each format. WebP needs no counter, because it is read in C; TGA needs none, because file size and pixel count bound its
time and memory.
"""
