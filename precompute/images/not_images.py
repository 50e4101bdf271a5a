"""Name the type of a file that is not a readable image, by its first bytes."""

import re
from collections.abc import Mapping

from precompute.images.box_parts import AVIF_BRANDS, HEIF_BRANDS

CONVERT = "convert it to PNG or JPEG"
CUT = "but its header is damaged or cut short"
NOT_READ = "but its header is damaged or of a kind that is not read"

HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})

OTHER_BRANDS = {
    **dict.fromkeys(HEIF_BRANDS, f"is HEIF: {CONVERT}"),
    b"crx ": f"is a raw photograph (CR3): {CONVERT}",
    b"M4A ": "is audio (M4A)",
}

COMPRESSED = {
    b"\x1f\x8b": "is compressed by gzip",
    b"BZh": "is compressed by bzip2",
    b"\xfd7zXZ\0": "is compressed by xz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"\x04\x22\x4d\x18": "is compressed by lz4",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive",
    b"Rar!\x1a\x07": "is a RAR archive",
}
"""Types of files that can be unpacked, by first bytes."""

BY_MAGIC = {
    **COMPRESSED,
    b"version https://git-lfs": "is a Git LFS pointer; fetch the file itself with git lfs pull",
    b"PK\x03\x04": "is a zip archive",
    b"%PDF-": "is a PDF document",
    b"%!PS": "is PostScript, a drawing: convert it to PNG",
    b"8BPS": f"is a Photoshop document: {CONVERT}",
    b"\0\0\1\0": f"is an icon (ICO): {CONVERT}",
    **dict.fromkeys((b"\xff\x0a", b"\0\0\0\x0cJXL "), f"is JPEG XL: {CONVERT}"),
    b"II\xbc\x01": f"is JPEG XR: {CONVERT}",
    b"qoif": f"is QOI: {CONVERT}",
    b"DDS ": f"is a DDS texture: {CONVERT}",
    b"\x76\x2f\x31\x01": f"is OpenEXR: {CONVERT}",
    b"#?RADIANCE": f"is Radiance HDR: {CONVERT}",
    b"SIMPLE  =": "is a FITS file",
    b"\x93NUMPY": "is a NumPy array",
    b"\x89HDF\r\n\x1a\n": "is an HDF5 file",
    b"\x1a\x45\xdf\xa3": "is a video (Matroska or WebM)",
    **dict.fromkeys((b"\0\0\1\xba", b"\0\0\1\xb3"), "is a video (MPEG)"),
    b"OggS": "is Ogg audio or video",
    b"ID3": "is audio (MP3)",
    b"SQLite format 3\0": "is an SQLite database",
    b"\x7fELF": "is a program (ELF)",
    **dict.fromkeys((b"Pf", b"PF"), f"is a PFM of floating-point pixels: {CONVERT}"),
    b"\xff\xd8": f"begins as a JPEG, {CUT}",
    b"\x89PNG": f"begins as a PNG, {CUT}",
    b"GIF8": f"begins as a GIF, {CUT}",
    b"BM": f"begins as a BMP, {NOT_READ}",
    **dict.fromkeys((b"II*\0", b"MM\0*"), f"begins as a TIFF, {NOT_READ}"),
    b"\0\0\0\x0cjP  ": f"begins as a JPEG 2000, {NOT_READ}",
}

BY_CONTENT_OF_RIFF = {
    b"AVI ": "is a video (AVI)",
    b"WAVE": "is audio (WAV)",
    b"WEBP": "begins as a WebP, but is damaged",
}

TEXT_BYTES = 4_096
"""Enough to tell what a text is."""

BY_TEXT = {
    r"\s*<(!doctype\s+html|html|head|body)[\s>]": "is text (HTML page), not an image",
    r"(?s)\s*<(.*?<)?svg[\s>]": "is SVG, a drawing: convert it to PNG",
    r"\s*<(\?xml|!--|\w+[\s>])": "is text (XML), not an image",
    r'\s*(\{\s*["}]|\[\s*[\[{"\d\]])': "is text (JSON), not an image",
}
"""Patterns of a file's beginning, in this order: a page may hold drawings, and a drawing may begin with comments."""

CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


def what_it_is(data: bytes) -> str:
    """Complete the sentence "the file …": is empty, is SVG, is a video."""
    if not data:
        return "is empty"
    if data.count(0) == len(data):
        return "holds only zero bytes"
    if data[4:8] == b"ftyp":
        return name_by_brands(data)
    if data.startswith(b"RIFF") and data[8:12] in BY_CONTENT_OF_RIFF:
        return BY_CONTENT_OF_RIFF[data[8:12]]
    return by_magic(data, BY_MAGIC) or name_by_text(data[:TEXT_BYTES]) or "is in no image format that is read here"


def by_magic(data: bytes, names: Mapping[bytes, str]) -> str | None:
    """Look up what a file is by its first bytes; None where no table entry fits."""
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
    """Name the kind of text; None where it is not text. The last character may be cut."""
    text = head.decode("utf-8-sig", errors="ignore")
    if len(text.encode()) < len(head) - 6 or CONTROL.search(text):
        return None
    found = (kind for pattern, kind in BY_TEXT.items() if re.match(pattern, text, re.IGNORECASE))
    return next(found, "is text, not an image")
