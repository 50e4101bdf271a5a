"""Contact sheets: the same rows as PNG, for slides, tickets and machines without a browser."""

# Axes: Y X pixels, 3 RGB.

import io
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from cache_store.gallery.exhibits import Exhibit

TILE = 160
"""Pixels of a picture's longest side on a sheet."""
GAP = 4
GROUND = 235
"""Grey of what is not there."""
WIDTH_INCHES = 12.0
LABEL_INCHES = 0.28
LABEL_CHARACTERS = 34
UNKNOWN_GLYPH = "\N{WHITE SQUARE}"


def contact_sheet(title: str, exhibits: Sequence[Exhibit]) -> bytes:
    """A PNG of all exhibits, each its pictures side by side over its channel strip, with row and id."""
    pictures = [composed(exhibit) for exhibit in exhibits]
    height, width = np.max([picture.shape[:2] for picture in pictures], axis=0)
    columns = max(1, min(len(pictures), round(WIDTH_INCHES * 100 / (width + 16))))
    lines = math.ceil(len(pictures) / columns)
    cell_inches = WIDTH_INCHES / columns
    cell_height = cell_inches * height / width + LABEL_INCHES
    layout = ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.04, hspace=0, wspace=0)
    figure = Figure(figsize=(WIDTH_INCHES, 0.5 + lines * cell_height), dpi=100, layout=layout)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, parse_math=False)
    for place, axes in enumerate(figure.subplots(lines, columns, squeeze=False).flat):
        axes.set_axis_off()
        if place < len(pictures):
            axes.imshow(padded(pictures[place], height, width), interpolation="nearest")
            axes.set_title(label(exhibits[place]), fontsize=7, loc="left", pad=3, parse_math=False)
    return png(figure)


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    with matplotlib.rc_context({"savefig.facecolor": "white"}):
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def label(exhibit: Exhibit) -> str:
    decibels = "" if exhibit.psnr is None else f"{exhibit.psnr:.1f} dB · "
    text = f"row {exhibit.row} · {decibels}{exhibit.reason or exhibit.id}"
    line = printable(" ".join(text.split()))
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


def padded(picture_YX3: np.ndarray, height: int, width: int) -> np.ndarray:
    missing_y, missing_x = height - picture_YX3.shape[0], width - picture_YX3.shape[1]
    return np.pad(picture_YX3, ((0, missing_y), (0, missing_x), (0, 0)), constant_values=255)
