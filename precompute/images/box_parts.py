"""Count the parts of JPEG 2000 and AVIF files, which are made of boxes, before their decoders walk them.

OpenJPEG allocates memory for every tile, precinct and code block, and a file of one kilobyte can declare millions. So a
file with smaller parts than any encoder writes is refused. If a file ends between two tiles, OpenJPEG would leave the
missing ones black, so all tiles must be there. libavif searches all items for each item, and allocates memory for every
frame.
"""

import re
import struct
from collections.abc import Iterator

from precompute.images.rejected import Rejected

SIZ, COD, COC, SOT, SOD, EOC = 0xFF51, 0xFF52, 0xFF53, 0xFF90, 0xFF93, 0xFFD9

SIZ_CONTENT = struct.Struct(">2x8IH")
"""End and start of the image, size and start of the tiles, number of components."""

MAX_COMPONENTS = 4
MAX_LAYERS = 100
"""Each is one more pass over all blocks; encoders write up to fifty."""

MIN_TILE_PIXELS, FEW_TILES = 4_096, 1_000
MIN_BLOCK_SIDE_LOG2, MIN_BLOCK_LOG2 = 4, 10
"""Smallest code blocks: 32 x 32 or 16 x 64 pixels; encoders usually write 64 x 64."""

MIN_PRECINCT_SIDE_LOG2 = 5
"""Smallest side of a precinct, in pixels of the whole image, at each resolution."""

AVIF_BRANDS, HEIF_BRANDS = frozenset({b"avif", b"avis"}), frozenset({b"mif1", b"msf1"})
"""Pillow passes a file that begins with one of these brands to libavif."""

MAX_TABLE_BYTES = 2**16
"""Size of each table of an AVIF's items; a grid of 512 tiles needs 10 KB."""
ITEM_TABLES = frozenset({b"iinf", b"iloc", b"iref", b"ipma"})

AVIF_FRAME_COUNT = re.compile(rb"stsz.{8}(.{4})", re.DOTALL)
"""Matches the number of frames that a track declares."""


def avif_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count boxes and frames; count nothing in other files made of boxes, such as videos."""
    if data[8:12] not in AVIF_BRANDS | HEIF_BRANDS:
        return
    for kind, begin, end in boxes(data, 0, len(data)):
        yield 1
        if kind == b"meta":
            yield from avif_items(data, begin + 4, end)
        elif kind == b"moov":
            yield from (int.from_bytes(match[1], "big") for match in AVIF_FRAME_COUNT.finditer(data, begin, end))


def avif_items(data: bytes, begin: int, end: int) -> Iterator[int]:
    for kind, first, last in boxes(data, begin, end):
        yield 1
        tables = boxes(data, first, last) if kind == b"iprp" else [(kind, first, last)]
        for table, table_begin, table_end in tables:
            yield 1
            if table in ITEM_TABLES and table_end - table_begin > MAX_TABLE_BYTES:
                raise Rejected("too many parts", f"a table of items of more than {MAX_TABLE_BYTES:,} bytes")


def jp2_parts(data: bytes, max_pixels: int) -> Iterator[int]:
    """Count boxes, entries of palettes, and the parts of the codestream."""
    size = None
    for kind, begin, end in boxes(data, 0, len(data)):
        yield 1
        if kind == b"jp2h":
            for inner, inner_begin, inner_end in boxes(data, begin, end):
                yield 1
                if inner == b"ihdr":
                    size = data[inner_begin : inner_begin + 8]
                elif inner == b"pclr":
                    yield int.from_bytes(data[inner_begin : inner_begin + 2], "big")
                elif inner == b"res ":
                    yield (inner_end - inner_begin) // 8
        elif kind == b"jp2c":
            if size is None:
                raise Rejected("cannot decode", "its header does not come before its codestream")
            yield from j2k_parts(data[begin:end], max_pixels, size)
            return
    raise Rejected("cannot decode", "cut short: there is no codestream in it")


def boxes(data: bytes, position: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type of each box, and where its content begins and ends; the last box may be cut off."""
    while position + 8 <= end:
        length, kind = struct.unpack_from(">I4s", data, position)
        begin = position + 8
        if length == 1 and begin + 8 <= end:
            length, begin = int.from_bytes(data[begin : begin + 8], "big"), begin + 8
        following = end if length == 0 else position + length
        if following < begin:
            raise Rejected("cannot decode", f"its box at byte {position:,} is damaged")
        yield kind, begin, min(following, end)
        position = following


def j2k_parts(data: bytes, max_pixels: int, size: bytes | None = None) -> Iterator[int]:
    """Count segments of the codestream and of each tile; `size` is the file header's height and width, as bytes."""
    tiles: int | None = None
    position, seen = 2, set[int]()
    try:
        while True:
            (marker,) = struct.unpack_from(">H", data, position)
            yield 1
            if marker == EOC:
                break
            (length,) = struct.unpack_from(">H", data, position + 2)
            if marker < 0xFF00 or length < 2:
                raise Rejected("cannot decode", f"its codestream is damaged at byte {position:,}")
            segment = data[position + 4 : position + 2 + length]
            if marker == SIZ and tiles is None:
                tiles = tiles_of(segment, size)
            elif marker == SOT:
                tile, tile_bytes = struct.unpack_from(">HI", data, position + 4)
                seen.add(tile)
                yield from tile_parts(data, position + 2 + length)
                position = position + tile_bytes if tile_bytes else data.rindex(b"\xff\xd9")
                continue
            refuse_small_blocks(marker, segment)
            position += 2 + length
    except (struct.error, ValueError):
        raise Rejected("cannot decode", "cut short: its codestream has no end") from None
    if tiles is None or len(seen) != tiles:
        raise Rejected("cannot decode", f"cut short: {len(seen)} of {tiles} tiles are there")


def tile_parts(data: bytes, position: int) -> Iterator[int]:
    """Count segments before a tile's data; they may change how the tile is cut."""
    while True:
        marker, length = struct.unpack_from(">HH", data, position)
        if marker == SOD:
            return
        yield 1
        refuse_small_blocks(marker, data[position + 4 : position + 2 + length])
        position += 2 + length


def tiles_of(siz: bytes, size: bytes | None) -> int:
    """Compute the number of tiles; raise Rejected if they are far too many for their image."""
    right, bottom, left, top, tile_width, tile_height, tile_left, tile_top, components = SIZ_CONTENT.unpack_from(siz)
    width, height = right - left, bottom - top
    if width <= 0 or height <= 0 or not (tile_width and tile_height) or components > MAX_COMPONENTS:
        raise Rejected("cannot decode", f"{width} x {height} pixels of {components} components in its codestream")
    if size is not None and size != struct.pack(">II", height, width):
        raise Rejected("cannot decode", "its header and its codestream differ in the image's size")
    tiles: int = -((tile_left - right) // tile_width) * -((tile_top - bottom) // tile_height)
    if tiles > max(FEW_TILES, width * height // MIN_TILE_PIXELS):
        raise Rejected("too many parts", f"{tiles:,} tiles of {tile_width} x {tile_height} pixels")
    return tiles


def refuse_small_blocks(marker: int, segment: bytes) -> None:
    """Raise Rejected if COD or COC cuts the image into far too many layers, code blocks or precincts."""
    if marker == COD:
        style, layers, coding = segment[:1], int.from_bytes(segment[2:4], "big"), segment[5:]
    elif marker == COC:
        style, layers, coding = segment[1:2], 1, segment[2:]
    else:
        return
    levels, width, height = coding[:3]
    width, height = (width & 15) + 2, (height & 15) + 2
    if layers > MAX_LAYERS or min(width, height) < MIN_BLOCK_SIDE_LOG2 or width + height < MIN_BLOCK_LOG2:
        raise Rejected("too many parts", f"{layers} layers of code blocks of {2**width} x {2**height} pixels")
    if style[0] & 1:
        precincts = coding[5 : levels + 6]
        sides = [min(each & 15, each >> 4) + levels - level for level, each in enumerate(precincts)]
        if len(precincts) <= levels or min(sides) < MIN_PRECINCT_SIDE_LOG2:
            raise Rejected("too many parts", "precincts of a few pixels")
