"""Netpbm images: PBM, PGM and PPM, plain and binary, of any maximum.

Pillow reads files with a maximum other than 255, and all plain files, value by value in Python: minutes for a
photograph, hours for a plain file full of comments.
"""

import re

import numpy as np
from PIL import Image

from precompute.images.rejected import Rejected, refuse_many_pixels

MAX_HEADER_BYTES = 2**16
"""Bytes of a header, comments included."""

BLANK = rb"(?:[ \t-\r]|#[^\r\n]*+[\r\n])++"
NETPBM = re.compile(rb"P[1-6][ \t-\r#]")
SIZE = rb"P[1-6]" + BLANK + rb"(\d{1,9})" + BLANK + rb"(\d{1,9})"
HEADERS = {True: re.compile(SIZE + rb"[ \t-\r]"), False: re.compile(SIZE + BLANK + rb"(\d{1,5})[ \t-\r]")}
"""Patterns by whether the image is bilevel; only other headers have a maximum. One blank comes before the pixels."""

COMMENT = re.compile(rb"#[^\r\n]*+")
LONG_VALUE = re.compile(rb"\d{10}")
BLANKS, DIGITS = b" \t\n\v\f\r", b"0123456789"


def decode_netpbm(data: bytes, max_pixels: int) -> Image.Image:
    """Decode the first image, bilevel, grey or RGB; raise Rejected if it is broken."""
    kind = data[1] - ord("0")
    is_bilevel, is_plain, channels = kind in (1, 4), kind <= 3, 3 if kind in (3, 6) else 1
    header = HEADERS[is_bilevel].match(data, 0, MAX_HEADER_BYTES)
    if header is None:
        raise Rejected("cannot decode", "its Netpbm header is damaged")
    width, height, maximum = map(int, (*header.groups(), b"1")[:3])
    if not (width and height and 0 < maximum < 65_536):
        raise Rejected("cannot decode", f"its Netpbm header claims {width} x {height} pixels of up to {maximum}")
    refuse_many_pixels(width, height, max_pixels)
    body, count = memoryview(data)[header.end() :], width * height * channels
    if is_bilevel and not is_plain:
        refuse_short(body, (width + 7) // 8 * height)
        return Image.frombytes("1", (width, height), body, "raw", "1;I")
    values = plain_values(body, count, is_bilevel) if is_plain else binary_values(body, count, maximum)
    if values.max() > maximum:
        raise Rejected("cannot decode", f"it has values above its maximum, {maximum}")
    levels = levels_of(maximum)[1 - values if is_bilevel else values]  # in PBM, 1 is black
    return Image.fromarray(levels.reshape((height, width, 3) if channels == 3 else (height, width)))


def levels_of(maximum: int) -> np.ndarray:
    """Scale values to 16 bits and keep the high byte: uint8 [maximum + 1]; maximum 255 changes nothing."""
    return (np.arange(maximum + 1, dtype=np.uint32) * 65_535 // maximum >> 8).astype(np.uint8)


def binary_values(body: memoryview, count: int, maximum: int) -> np.ndarray:
    kind = np.dtype(np.uint8 if maximum < 256 else ">u2")
    refuse_short(body, count * kind.itemsize)
    return np.frombuffer(body, kind, count)


def plain_values(body: memoryview, count: int, is_bilevel: bool) -> np.ndarray:
    """Read the first `count` numbers; a PBM's are single digits, which need no blanks between them."""
    text = COMMENT.sub(b" ", body)
    if text.translate(None, BLANKS + DIGITS) or (not is_bilevel and LONG_VALUE.search(text)):
        raise Rejected("cannot decode", "it has values that are no small numbers")
    if is_bilevel:
        text = text.translate(None, BLANKS)
        refuse_short(text, count)
        return np.frombuffer(text, np.uint8, count) - np.uint8(ord("0"))
    values = np.fromstring(text, np.int32, sep=" ")
    refuse_short(values, count)
    return values[:count]


def refuse_short(found: memoryview | bytes | np.ndarray, needed: int) -> None:
    if len(found) < needed:
        raise Rejected("cannot decode", f"cut short: {len(found):,} of {needed:,} bytes or values are there")
