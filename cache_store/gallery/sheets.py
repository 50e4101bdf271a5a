"""Contact sheets: the page's rows as PNG files, for slides, tickets and machines without a browser."""

# Axes: Y X pixels, 3 RGB.

import io
import math
from bisect import bisect
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import text_to_path
from PIL import Image

from cache_store.gallery.exhibits import Exhibit
from cache_store.gallery.page import shorten_text

TILE = 160
"""Side of a square picture in pixels; other pictures have the same area, but no side longer than twice this."""
FRAME_TILE = TILE // 2
"""The same of each frame of a clip."""
GAP = 4
GROUND = 235
"""Grey value of a missing picture."""
DPI = 100
WIDEST, NARROWEST = 1_360, 480
TITLE, MARGIN = 40, 14
"""Height of the sheet's title, and of the white space around a row's pictures, in pixels."""
COLUMN = 240
"""Least width of a row in pixels, so that its id and reason fit above the pictures."""
LABEL_SIZE, LABEL_LINE = 7, 13
"""Font size of a label in points, and its line height in pixels."""
ID_LINES, REASON_LINES = 2, 3
UNKNOWN_GLYPH = "\N{WHITE SQUARE}"


def contact_sheet(title: str, exhibits: Sequence[Exhibit]) -> bytes:
    """Draw all exhibits as one PNG: for each, row, id and reason above its pictures, and the channel strip below."""
    pictures = [compose(exhibit, *fitting_size(exhibit)) for exhibit in exhibits]
    width = max(COLUMN, *(picture.shape[1] for picture in pictures))
    labels = [label(exhibit, width) for exhibit in exhibits]
    above, step_x = LABEL_LINE * max(map(len, labels)), width + MARGIN
    step_y = above + max(picture.shape[0] for picture in pictures) + MARGIN
    columns = max(1, min(len(pictures), (WIDEST - MARGIN) // step_x))
    lines = math.ceil(len(pictures) / columns)
    sheet = np.full((TITLE + lines * step_y, max(NARROWEST, MARGIN + columns * step_x), 3), 255, np.uint8)
    figure = Figure(figsize=(sheet.shape[1] / DPI, sheet.shape[0] / DPI), dpi=DPI)
    write(figure, title, MARGIN, 0.7 * TITLE, size=12)
    for place, (text, picture) in enumerate(zip(labels, pictures, strict=True)):
        y, x = TITLE + place // columns * step_y + above, MARGIN + place % columns * step_x
        sheet[y : y + picture.shape[0], x : x + picture.shape[1]] = picture
        for line, words in enumerate(text):
            write(figure, words, x, y - 5 - LABEL_LINE * (len(text) - 1 - line), LABEL_SIZE)
    figure.figimage(sheet)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def write(figure: Figure, text: str, x: float, y: float, size: float) -> None:
    """Draw text whose baseline starts at pixel (x, y) from the top left; untrusted, so formulas are not parsed."""
    width, height = figure.get_size_inches() * DPI
    figure.text(x / width, 1 - y / height, replace_missing_glyphs(text), fontsize=size, parse_math=False)


def label(exhibit: Exhibit, width: float) -> list[str]:
    """Make the lines of a label, at most `width` pixels wide: row and id, then the reason of a rejected row."""
    decibels = "" if exhibit.psnr is None else f"{exhibit.psnr:.1f} dB · "
    lines = wrap(f"row {exhibit.row} · {decibels}{exhibit.id}", width, ID_LINES)
    return [*lines, *wrap(exhibit.reason, width, REASON_LINES)] if exhibit.reason else lines


def wrap(text: str, width: float, most: int) -> list[str]:
    """Break text between words, or inside a word longer than a line; text beyond `most` lines is cut."""
    rest, lines = replace_missing_glyphs(shorten_text(text)), list[str]()
    while rest and len(lines) < most:
        fits = bisect(range(1, len(rest) + 1), width, key=lambda end: text_width(rest[:end]))
        space = rest.rfind(" ", 1, fits + 1) if fits < len(rest) else fits
        end = max(1, fits if space < 0 else space)
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    return [*lines[:-1], f"{lines[-1][:-1]}…"] if rest else lines


def text_width(text: str) -> float:
    """Return the width of a label's text in pixels."""
    points, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=LABEL_SIZE), ismath=False)
    return float(points) * DPI / 72


def replace_missing_glyphs(text: str) -> str:
    """Replace characters that the font lacks by squares; matplotlib would warn about each."""
    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(character if ord(character) in known else UNKNOWN_GLYPH for character in text)


def compose(exhibit: Exhibit, height: int, width: int) -> np.ndarray:
    """Compose source, preview, decoded and error side by side, of a clip below each other, with the channels' strip
    below at the same width.
    """
    drawn = (exhibit.preview, exhibit.decoded, exhibit.error)
    pictures = [exhibit.source, *(each for each in drawn if each is not None)]
    top = concatenate([resize(picture, height, width) for picture in pictures], axis=0 if exhibit.frames > 1 else 1)
    if exhibit.strip is None:
        return top
    strip = np.asarray(exhibit.strip.convert("RGBA").convert("RGB"))
    strip_height = round(top.shape[1] * strip.shape[0] / strip.shape[1])
    return concatenate([top, resize(strip, strip_height, top.shape[1])], axis=0)


def concatenate(pictures: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate pictures along `axis` with white gaps between them."""
    shape = list(pictures[0].shape)
    shape[axis] = GAP
    gap = np.full(shape, 255, np.uint8)
    return np.concatenate([part for picture in pictures for part in (picture, gap)][:-1], axis=axis)


def fitting_size(exhibit: Exhibit) -> tuple[int, int]:
    """Return height and width of a picture on the sheet."""
    (_, height, width), tile = exhibit.array.size, TILE if exhibit.frames == 1 else FRAME_TILE
    scale = min(tile / math.sqrt(height * width), 2 * tile / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale)) * exhibit.frames


def resize(picture_YX3: np.ndarray | None, height: int, width: int) -> np.ndarray:
    if picture_YX3 is None:
        return np.full((height, width, 3), GROUND, np.uint8)
    method = Image.Resampling.BOX if picture_YX3.shape[1] > width else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(picture_YX3).resize((width, height), method))
