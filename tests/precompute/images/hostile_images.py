"""Hostile image files: small files that claim, or need, a lot."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def save(image: Image.Image, format_: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


def small(mode: str = "RGB") -> Image.Image:
    if mode == "LAB":  # Pillow converts no other mode to it
        return Image.new("LAB", (9, 9))
    pixels = np.random.default_rng(0).integers(0, 255, (9, 11, 3), np.uint8)
    return Image.fromarray(pixels).convert("I" if mode == "I;16" else mode).convert(mode)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, extra: bytes = b"", *, colour: int = 6, bits: int = 8, data: bytes | None = None
) -> bytes:
    """Make a PNG of one value, which deflate packs a thousandfold."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    if data is None:
        data = zlib.compress(bytes((width * channels * bits // 8 + 1) * height), 9)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return PNG_MAGIC + header + extra + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def grey_tiff(width: int, height: int, more: dict[int, tuple[int, int, int | bytes]], compression: int = 1) -> bytes:
    """Make a TIFF with a directory of {tag: (type, count, value)}; bytes come after it."""
    size = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, compression), 262: (3, 1, 1)}
    entries = {**size, 277: (3, 1, 1), **more}
    directory, data = struct.pack("<H", len(entries)), b""
    behind = 8 + 2 + 12 * len(entries) + 4
    for tag, (kind, count, value) in sorted(entries.items()):
        if isinstance(value, bytes):
            value, data = behind + len(data), data + value
        directory += struct.pack("<HHII", tag, kind, count, value)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + data


STRIP, TILE = (273, 279), (324, 325)
"""Tags of the offset and the size of a TIFF's pixels."""


def tiff_around(data: bytes, width: int, height: int, more: Any, compression: int = 1, place: Any = STRIP) -> bytes:
    """Make a TIFF whose pixels are `data`."""
    tags = {**more, place[1]: (4, 1, len(data))}
    behind = len(grey_tiff(width, height, {**tags, place[0]: (4, 1, 0)}))
    return grey_tiff(width, height, {**tags, place[0]: (4, 1, behind)}, compression) + data


def packed_zeros(mebibytes: int) -> bytes:
    """Compress repeated data without holding it in memory: one block again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    adler32 = (mebibytes * 2**20 % 65_521) << 16 | 1
    return b"\x78\x01" + block * mebibytes + b"\x03\0" + struct.pack(">I", adler32)


def jpeg_scans(scans: int) -> bytes:
    """Make a progressive JPEG that repeats its last scan: each scan is a pass over the image."""
    data = save(Image.new("L", (1_000, 1_000)), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


def patched(data: bytes, marker: bytes, place: int, value: bytes) -> bytes:
    """Replace bytes at an offset from a marker."""
    begin = data.index(marker) + place
    return data[:begin] + value + data[begin + len(value) :]


def gif_with(extensions: bytes = b"", screen: tuple[int, int] = (8, 8), frame: tuple[int, int] = (8, 8)) -> bytes:
    pixels = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6) + extensions + pixels + b";"


def bmp_of_size(width: int, height: int, compression: int = 0, data: bytes = bytes(64)) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + header + bytes(1024) + data


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + kind + content


TWO_FRAMES = save(small(), "WEBP", save_all=True, append_images=[small("L").convert("RGB")])
HUGE_TILE = {322: (4, 1, 2**15), 323: (4, 1, 2**15)}
HUGE = b"\x7f\xff\xff\xff" * 2

REFUSED: dict[str, Callable[[], bytes]] = {
    "a PNG that claims 2^31 x 2^31 pixels": lambda: png(2**31 - 1, 2**31 - 1, data=b""),
    "a PNG of a million empty chunks": lambda: png(8, 8, png_chunk(b"prVt", b"") * 1_000_000),
    "a PNG with a text of 256 MB": lambda: png(8, 8, png_chunk(b"zTXt", b"a\0\0" + packed_zeros(256))),
    "a JPEG that claims 65,535 x 65,535 pixels": lambda: patched(save(small(), "JPEG"), b"\xff\xc0", 5, b"\xff" * 4),
    "a JPEG of ten thousand scans": lambda: jpeg_scans(10_000),
    "a JPEG of a million segments": lambda: b"\xff\xd8" + b"\xff\xee\0\2" * 1_000_000 + save(small(), "JPEG")[2:],
    "a TIFF that claims 2^31 x 2^31 pixels": lambda: grey_tiff(2**31, 2**31, {273: (4, 1, 8)}),
    "a TIFF of a million strips": lambda: grey_tiff(1, 10**6, {273: (4, 10**6, b"\x08\0\0\0" * 10**6), 278: (3, 1, 1)}),
    "a TIFF of a huge tile": lambda: tiff_around(packed_zeros(1_024), 1, 1, HUGE_TILE, 8, TILE),
    "a GIF that claims 65,535 x 65,535 pixels": lambda: gif_with(screen=(65_535, 65_535)),
    "a GIF of a million comments": lambda: gif_with(b"!\xfe\x01a\0" * 1_000_000),
    "a WebP of a huge canvas": lambda: patched(TWO_FRAMES, b"VP8X", 12, b"\xff\x3f\0" * 2),
    "a BMP that claims 2^31 x 2^31 pixels": lambda: bmp_of_size(2**31 - 1, 2**31 - 1),
    "a BMP of 20 MB of run lengths": lambda: bmp_of_size(2_000, 2_000, 1, b"\1\7" * 10**7),
    "an AVIF that claims 2^31 x 2^31 pixels": lambda: save(small(), "AVIF").replace(struct.pack(">II", 11, 9), HUGE),
    "an AVIF of a million boxes": lambda: save(small(), "AVIF") + box(b"free", b"") * 1_000_000,
}
"""Files by description; all must be refused, with little memory and time."""


HEAVY_PIXELS = (2_000, 2_000)


def large(format_: str, mode: str = "RGBA", colour: Any = (1, 2, 3, 4), **options: object) -> bytes:
    return save(Image.new(mode, HEAVY_PIXELS, colour), format_, **options)


HEAVY: dict[str, Callable[[], bytes]] = {
    "JPEG in CMYK": lambda: large("JPEG", "CMYK", 0, progressive=True),
    "WebP with alpha": lambda: large("WEBP", lossless=True, method=0),
    "AVIF with alpha": lambda: large("AVIF", speed=10, subsampling="4:4:4"),
}
"""Images of the most pixels allowed, in the modes that need the most memory per pixel."""


def fuzz_corpus() -> list[bytes]:
    """Make small files of every format, in most flavours."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    tiffs = {"RGBA": "tiff_deflate", "P": "tiff_lzw", "1": "group4", "L": "packbits", "CMYK": "tiff_adobe_deflate"}
    tiffs |= {"I;16": "raw", "LAB": "raw"}
    two = {"save_all": True, "append_images": [small("L").convert("RGB")]}
    flavours: list[tuple[str, str, dict[str, Any]]] = [
        *(("JPEG", mode, {}) for mode in ("RGB", "L", "CMYK")),
        *(("JPEG", "RGB", options) for options in ({"progressive": True}, {"quality": 5, "exif": exif})),
        *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        ("PNG", "P", {"transparency": 3, "exif": exif}),
        *(("TIFF", mode, {"compression": name, "exif": exif}) for mode, name in tiffs.items()),
        *(("TIFF", "RGB", {"compression": name, "exif": exif}) for name in ("raw", "jpeg", "zstd")),
        *(("GIF", "P", options) for options in ({"transparency": 1, "comment": b"hello"}, two)),
        *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("WEBP", "RGBA", options) for options in ({"lossless": True}, {"quality": 20}, {"exif": exif}, two)),
        *(("AVIF", mode, {"speed": 10, "exif": exif}) for mode in ("L", "RGBA")),
        ("MPO", "RGB", two),
    ]
    xmp = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation='3'/>")
    others = png(9, 9, xmp), bmp_of_size(8, 8, 1, b"\x08\x05\0\0" * 8 + b"\0\1")
    return [*(save(small(mode), each, **options) for each, mode, options in flavours), *others]


def mutated(corpus: list[bytes], rng: np.random.Generator) -> bytes:
    """Damage a file: flip bits, set bytes to extremes, cut a part out, repeat it, or take it from another file."""
    data = bytearray(corpus[rng.integers(len(corpus))])
    for _ in range(rng.integers(1, 5)):
        place = int(min(rng.integers(len(data) + 1), rng.integers(len(data) + 1)))  # headers more often
        length, other = int(rng.integers(1, 9)), corpus[rng.integers(len(corpus))]
        flipped = (place + 1, bytes(byte ^ 1 << int(rng.integers(8)) for byte in data[place : place + 1]))
        extreme = (place + length, bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF])]) * length)
        repeated = (place, data[place : place + 10 * length])
        cut_off, cut_out, joined = (len(data), b""), (place + length, b""), (len(data), other[place:])
        end, new = [flipped, flipped, extreme, repeated, cut_off, cut_out, joined][rng.integers(7)]
        data[place:end] = new
    return bytes(data)
