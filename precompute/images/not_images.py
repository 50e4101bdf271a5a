"""Say what a file is that no decoder opens, by its first bytes.

These texts, as every reason to reject a sample, are bytes of a cache: another wording gives another identity.
"""

import re
from collections.abc import Mapping

from precompute.images.parts import AVIF_BRANDS

HEIC_BRANDS = (b"hei", b"hev", b"mif1", b"msf1")
"""Beginnings of the brands of HEIC, and of HEIF without the name of a codec."""

PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "RAR",
}

BY_MAGIC = {
    **PACKED,
    b"version https://git-lfs": "a Git LFS pointer",
    b"PK\x03\x04": "zip",
    b"%PDF-": "PDF",
    b"\x1a\x45\xdf\xa3": "Matroska or WebM",
    b"\xff\xd8": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    **dict.fromkeys((b"II*\0", b"MM\0*"), "TIFF"),
    **dict.fromkeys((b"\xff\x0a", b"\0\0\0\x0cJXL "), "JPEG XL"),
    **dict.fromkeys((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), "JPEG 2000"),
}

ADVICE = {
    "a Git LFS pointer": "fetch the file itself with git lfs pull",
    "HEIC": "convert it to PNG or JPEG, with pillow-heif for one",
    **dict.fromkeys(("JPEG XL", "JPEG 2000"), "convert it to PNG or JPEG"),
}

HEAD_BYTES = 4_096

SHOWN = 40

CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


def describe_file(data: bytes, media: str) -> str:
    """Complete the sentence "the file …", for one that has no image or video, as `media` says, that can be decoded."""
    if not data or data.count(0) == len(data):
        return "holds only zero bytes" if data else "is empty"
    if name := name_by_brands(data) or name_by_magic(data, BY_MAGIC):
        advice = f"; {ADVICE[name]}" if name in ADVICE else ""
        return f"begins as {name}, but has no {media} that can be read{advice}"
    head = data[:HEAD_BYTES]
    text = head.decode("utf-8-sig", errors="ignore")
    if len(text.encode()) >= len(head) - 6 and not CONTROL.search(text):  # the last character may be cut
        return f"is text, no {media}: {text.strip()[:SHOWN]!r}"
    return f"is in no format of {media}s that is read here"


def name_by_magic(data: bytes, names: Mapping[bytes, str]) -> str | None:
    return next((name for magic, name in names.items() if data.startswith(magic)), None)


def name_by_brands(data: bytes) -> str | None:
    """Name an ISO media file by the brands in its first box, or a RIFF by its type; None for others."""
    if data.startswith(b"RIFF"):
        return "WebP" if data[8:12] == b"WEBP" else "AVI"
    if data[4:8] != b"ftyp":
        return None
    names = data[8 : min(int.from_bytes(data[:4], "big"), HEAD_BYTES)]
    brands = {names[place : place + 4] for place in range(0, len(names), 4)}
    if brands & AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if any(each.startswith(HEIC_BRANDS) for each in brands) else "MP4 or QuickTime"
