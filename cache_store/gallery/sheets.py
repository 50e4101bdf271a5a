"""Contact sheets: the same rows as PNG, for slides, tickets and machines without a browser."""

# Axes: Y X pixels, 3 RGB.

import io
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from PIL import Image

from cache_store.gallery.exhibits import Exhibit

TILE = 160
"""Pixels of a picture's longest side on a sheet."""
GAP = 4
GROUND = 235
"""Grey of what is not there."""
DPI = 100
WIDEST, NARROWEST = 1_360, 480
TITLE, LABEL, MARGIN = 40, 20, 12
"""Pixels: bounds of the sheet's width, the heights of its title and of a label, the white around a row's pictures."""
LABEL_CHARACTERS = 34
UNKNOWN_GLYPH = "\N{WHITE SQUARE}"


def contact_sheet(title: str, exhibits: Sequence[Exhibit]) -> bytes:
    """A PNG of all exhibits, each its pictures side by side over its channel strip, under row and id."""
    pictures = [composed(exhibit) for exhibit in exhibits]
    step_y = max(picture.shape[0] for picture in pictures) + LABEL + MARGIN
    step_x = max(picture.shape[1] for picture in pictures) + MARGIN
    columns = max(1, min(len(pictures), (WIDEST - MARGIN) // step_x))
    lines = math.ceil(len(pictures) / columns)
    sheet = np.full((TITLE + lines * step_y, max(NARROWEST, MARGIN + columns * step_x), 3), 255, np.uint8)
    figure = Figure(figsize=(sheet.shape[1] / DPI, sheet.shape[0] / DPI), dpi=DPI)
    write(figure, title, MARGIN, 0.7 * TITLE, size=12)
    for place, (exhibit, picture) in enumerate(zip(exhibits, pictures, strict=True)):
        y, x = TITLE + place // columns * step_y + LABEL, MARGIN + place % columns * step_x
        sheet[y : y + picture.shape[0], x : x + picture.shape[1]] = picture
        write(figure, label(exhibit), x, y - 5, size=7)
    figure.figimage(sheet)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def write(figure: Figure, text: str, x: float, y: float, size: float) -> None:
    """Text with its base line's left end at a pixel, counted from the top; untrusted, so never parsed as formulas."""
    width, height = figure.get_size_inches() * DPI
    figure.text(x / width, 1 - y / height, printable(text), fontsize=size, parse_math=False)


def label(exhibit: Exhibit) -> str:
    decibels = "" if exhibit.psnr is None else f"{exhibit.psnr:.1f} dB · "
    text = f"row {exhibit.row} · {decibels}{exhibit.reason or exhibit.id}"
    line = " ".join(text.split())
    return line if len(line) <= LABEL_CHARACTERS else f"{line[: LABEL_CHARACTERS - 1]}…"


def printable(text: str) -> str:
    """Glyphs that the font lacks become squares; matplotlib would warn of each."""
    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(character if ord(character) in known else UNKNOWN_GLYPH for character in text)


def composed(exhibit: Exhibit) -> np.ndarray:
    """Source, preview, decoded and error side by side; under them the strip, as wide as they are."""
    shape = exhibit.preview if exhibit.preview is not None else exhibit.source
    height, width = (TILE, TILE) if shape is None else fitted(shape)
    pictures = [exhibit.source]
    if exhibit.preview is not None:
        pictures += [exhibit.preview, *(each for each in (exhibit.decoded, exhibit.error) if each is not None)]
    top = joined([resized(picture, height, width) for picture in pictures], axis=1)
    if exhibit.strip is None:
        return top
    strip = np.asarray(exhibit.strip.convert("RGBA").convert("RGB"))
    strip_height = round(top.shape[1] * strip.shape[0] / strip.shape[1])
    return joined([top, resized(strip, strip_height, top.shape[1])], axis=0)


def joined(pictures: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """One after the other with a white gap between."""
    shape = list(pictures[0].shape)
    shape[axis] = GAP
    gap = np.full(shape, 255, np.uint8)
    return np.concatenate([part for picture in pictures for part in (picture, gap)][:-1], axis=axis)


def fitted(picture_YX3: np.ndarray) -> tuple[int, int]:
    """The picture's height and width with `TILE` as the longer."""
    height, width = picture_YX3.shape[:2]
    scale = TILE / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def resized(picture_YX3: np.ndarray | None, height: int, width: int) -> np.ndarray:
    if picture_YX3 is None:
        return np.full((height, width, 3), GROUND, np.uint8)
    method = Image.Resampling.BOX if picture_YX3.shape[1] > width else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(picture_YX3).resize((width, height), method))
