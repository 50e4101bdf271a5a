"""Name the type of a file that is not a readable image, by its first bytes.

These texts, as every reason to reject a sample, are bytes of a cache: another wording gives another identity.
"""

import re
from collections.abc import Mapping
from itertools import product

from precompute.images.parts import AVIF_BRANDS, HEIF_BRANDS

CONVERT = "convert it to PNG or JPEG"
CUT = "but its header is damaged or cut short"
NOT_READ = "but its header is damaged or of a kind that is not read"

HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})

OTHER_BRANDS = {
    **dict.fromkeys(HEIF_BRANDS, f"is HEIF: {CONVERT}"),
    b"crx ": f"is a raw photograph (CR3): {CONVERT}",
}

COMPRESSED = {
    b"\x1f\x8b": "is compressed by gzip",
    b"BZh": "is compressed by bzip2",
    b"\xfd7zXZ\0": "is compressed by xz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive",
    b"Rar!\x1a\x07": "is a RAR archive",
}
"""Types of files that can be unpacked, by first bytes."""

BY_MAGIC = {
    **COMPRESSED,
    b"version https://git-lfs": "is a Git LFS pointer; fetch the file itself with git lfs pull",
    b"PK\x03\x04": "is a zip archive",
    b"%PDF-": "is a PDF document",
    b"8BPS": f"is a Photoshop document: {CONVERT}",
    **dict.fromkeys((b"\xff\x0a", b"\0\0\0\x0cJXL "), f"is JPEG XL: {CONVERT}"),
    b"\x1a\x45\xdf\xa3": "is a video (Matroska or WebM)",
    b"\xff\xd8": f"begins as a JPEG, {CUT}",
    b"\x89PNG": f"begins as a PNG, {CUT}",
    b"GIF8": f"begins as a GIF, {CUT}",
    b"BM": f"begins as a BMP, {NOT_READ}",
    **dict.fromkeys((b"II*\0", b"MM\0*"), f"begins as a TIFF, {NOT_READ}"),
    **dict.fromkeys((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), f"is JPEG 2000: {CONVERT}"),
    **dict.fromkeys((b"P%d%c" % each for each in product(range(1, 7), b" \n")), f"is Netpbm (PPM): {CONVERT}"),
}
"""Files found among images, by first bytes."""

TEXT_BYTES = 4_096
"""Bytes that are enough to tell what a text is."""

BY_TEXT = {
    r"\s*<(!doctype\s+html|html|head|body)[\s>]": "is text (HTML page), not an image",
    r"(?s)\s*<(.*?<)?svg[\s>]": "is SVG, a drawing: convert it to PNG",
    r"\s*<(\?xml|!--|\w+[\s>])": "is text (XML), not an image",
    r'\s*(\{\s*["}]|\[\s*[\[{"\d\]])': "is text (JSON), not an image",
}
"""Patterns of a file's beginning, in this order: a page may hold drawings, and a drawing may begin with comments."""

CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


def describe_file(data: bytes) -> str:
    """Complete the sentence "the file …": is empty, is SVG, is a video."""
    if not data:
        return "is empty"
    if data.count(0) == len(data):
        return "holds only zero bytes"
    if data[4:8] == b"ftyp":
        return name_by_brands(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "begins as a WebP, but is damaged"
    return name_by_magic(data, BY_MAGIC) or name_by_text(data[:TEXT_BYTES]) or "is in no image format that is read here"


def name_by_magic(data: bytes, names: Mapping[bytes, str]) -> str | None:
    """Look up what a file is by its first bytes; None if no entry fits."""
    return next((name for magic, name in names.items() if data.startswith(magic)), None)


def name_by_brands(data: bytes) -> str:
    """Name an ISO media file by the brands in its first box."""
    names = data[8 : min(int.from_bytes(data[:4], "big"), TEXT_BYTES)]
    brands = {names[place : place + 4] for place in range(0, len(names), 4)}
    if brands & AVIF_BRANDS:
        return f"begins as an AVIF, {NOT_READ}"
    if brands & HEIC_BRANDS:
        return f"is HEIC: {CONVERT}, with pillow-heif for one"
    return OTHER_BRANDS.get(names[:4], "is a video (MP4 or QuickTime)")


def name_by_text(head: bytes) -> str | None:
    """Name the kind of text; None if it is not text. The last character may be cut."""
    text = head.decode("utf-8-sig", errors="ignore")
    if len(text.encode()) < len(head) - 6 or CONTROL.search(text):
        return None
    found = (kind for pattern, kind in BY_TEXT.items() if re.match(pattern, text, re.IGNORECASE))
    return next(found, "is text, not an image")
