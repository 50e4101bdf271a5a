"""Fit an image to the recipe's size: choose the visible part, its size, and how far to reduce a JPEG before that."""

# Axes: Y X image height and width in pixels, 3 RGB. Sizes are width, height; boxes left, top, right, bottom.

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from cache_store.format.array import ImageRecipe
from precompute.images.buckets import Box, Placement, Size, place
from precompute.images.rejected import Rejected, refuse_many_pixels, rejecting

MID_GREY = 128
"""Fills a rejected image's place in its batch, and the border of `pad`."""

BLACK = 0
"""Fills what a rule of buckets leaves open, as NeMo's may, by a pixel."""

RESAMPLING = {name: Image.Resampling[name.upper()] for name in ("bilinear", "bicubic", "lanczos", "box")}

REDUCTIONS = (8, 4, 2)
"""Factors by which libjpeg divides both sides at almost no cost, largest first."""
OVERSAMPLING = 2
"""Fewest pixels of a reduced image, along each side, per pixel of the fitted image."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An upright RGB image, perhaps reduced while it was decoded."""

    rgb: Image.Image
    size: Size
    """Size of the image before it was reduced."""
    reduction: int = 1
    """Pixels of the unreduced image, along each side, per pixel of `rgb`."""
    origin: tuple[float, float] = (0.0, 0.0)
    """Start of the image in `rgb`; above 0 if EXIF mirrors it, because its partial last pixel then comes first."""
    exif_is_readable: bool = True
    """False if the image may be stored turned, and its EXIF cannot tell."""


def unreduced(rgb: Image.Image, exif_is_readable: bool = True) -> Decoded:
    return Decoded(rgb=rgb, size=rgb.size, exif_is_readable=exif_is_readable)


def squash(size: Size, target: Size) -> tuple[Box, Size]:
    return (0, 0, *size), target


def crop(size: Size, target: Size) -> tuple[Box, Size]:
    """Select the middle, with the target's aspect, as Pillow's `ImageOps.fit` does."""
    (width, height), ratio = size, target[0] / target[1]
    seen_width = ratio * height if width / height > ratio else width
    seen_height = width / ratio if width / height < ratio else height
    left, top = (width - seen_width) * 0.5, (height - seen_height) * 0.5
    return (left, top, left + seen_width, top + seen_height), target


def pad(size: Size, target: Size) -> tuple[Box, Size]:
    """Select the whole image, scaled to fit inside the target, as Pillow's `ImageOps.contain` does."""
    (width, height), ratio = size, target[0] / target[1]
    columns = round(width / height * target[1]) if width / height < ratio else target[0]
    rows = round(height / width * target[0]) if width / height > ratio else target[1]
    return (0, 0, width, height), (columns, rows)


def shorter_side(size: Size, side: int) -> tuple[Box, Size]:
    """Select the whole image, its shorter side scaled to `side` pixels, as transformers' image processors do."""
    longer = int(side * max(size) / min(size))
    return (0, 0, *size), (side, longer) if size[0] <= size[1] else (longer, side)


OTHER_BUCKET = "other bucket"
"""Kind of reject for an image that the rule of buckets does not place where planning did."""

BUCKET = "bucket"
"""The fit by a rule of buckets."""

Fit = Callable[[Size, Size], tuple[Box, Size]]
"""Maps an image's size and the recipe's to the part that is seen and the size it becomes; the excess is cut."""

FITS: dict[str, Fit] = {"squash": squash, "crop": crop, "pad": pad}

EDGE = re.compile(r"edge ([1-9][0-9]{0,4})")
"""A fit that scales the shorter side to this many pixels, then keeps the middle."""


def find_fit(name: str) -> Fit | None:
    """Return the fit of that name; None if there is none."""
    if edge := EDGE.fullmatch(name):
        return lambda size, target: shorter_side(size, int(edge[1]))
    return FITS.get(name)


def fit_of(recipe: ImageRecipe) -> Fit:
    fit = find_fit(recipe.fit)
    assert fit is not None, recipe.fit
    return fit


def fitted_start(size: int, target: int) -> int:
    """Return the fitted image's start on one axis: a border is rounded as by Pillow's `ImageOps.pad`, a cut down."""
    return -((size - target) // 2) if size > target else round((target - size) * 0.5)


def placement_of(size: Size, recipe: ImageRecipe) -> Placement | None:
    """Place an image by the recipe's rule of buckets, if it has one; Rejected unless that is the recipe's size."""
    if not recipe.buckets:
        return None
    placement = place(recipe.buckets, size)
    _, height, width = placement.bucket
    if (width, height) != (recipe.width, recipe.height):
        planned = f"was planned for {recipe.width}x{recipe.height}"
        raise Rejected(OTHER_BUCKET, f"the image of {size[0]} x {size[1]} belongs to {width}x{height}, but {planned}")
    refuse_many_pixels(*placement.resized, recipe.max_pixels)  # 1,000,000 x 1 would be scaled to 256,000,000 x 256
    return placement


class Fitting(NamedTuple):
    """How an image becomes one of the recipe's size."""

    seen: Box
    """The part of the image that is scaled."""
    size: Size
    """Its size after that."""
    start: tuple[int, int]
    """Where it begins in the fitted image; negative where it is cut."""


def fitting_of(size: Size, recipe: ImageRecipe) -> Fitting:
    target = (recipe.width, recipe.height)
    if placement := placement_of(size, recipe):
        if placement.seen is not None:
            return Fitting(placement.seen, target, (0, 0))
        left, top = placement.crop
        return Fitting((0, 0, *size), placement.resized, (-left, -top))
    seen, fitted = fit_of(recipe)(size, target)
    return Fitting(seen, fitted, (fitted_start(fitted[0], target[0]), fitted_start(fitted[1], target[1])))


def reduction(size: Size, recipe: ImageRecipe) -> int:
    """Return the factor by which an upright image of this size may be reduced before it is fitted."""
    if recipe.decode == "full":
        return 1
    (left, top, right, bottom), (columns, rows), _ = fitting_of(size, recipe)
    spare = min((right - left) / max(columns, 1), (bottom - top) / max(rows, 1)) / OVERSAMPLING
    return max((each for each in REDUCTIONS if each <= spare), default=1)


@rejecting()
def fit_image(image: Decoded, recipe: ImageRecipe) -> Image.Image:
    """Scale an image to the recipe's size; flip last, so that the result exactly mirrors the unflipped one."""
    target = (recipe.width, recipe.height)
    seen, size, start = fitting_of(image.size, recipe)
    left, top, right, bottom = (edge / image.reduction + image.origin[axis % 2] for axis, edge in enumerate(seen))
    if size == target:
        fitted = image.rgb.resize(size, RESAMPLING[recipe.resample], (left, top, right, bottom))
    else:
        fitted = Image.new("RGB", target, (BLACK if recipe.buckets else MID_GREY,) * 3)
        if min(size) > 0:
            inner = image.rgb.resize(size, RESAMPLING[recipe.resample], (left, top, right, bottom))
            fitted.paste(inner, start)
    return fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if recipe.flip else fitted


def to_pixels(image: Image.Image) -> np.ndarray:
    """Convert to uint8 [Y, X, 3]."""
    return np.asarray(image, np.uint8)
