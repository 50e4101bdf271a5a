"""Fit an image to the recipe's size: choose the visible part, its size, and how far to reduce a JPEG before that."""

# Axes: Y X image height and width in pixels, 3 RGB. Sizes are width, height; boxes left, top, right, bottom.

from dataclasses import dataclass

from PIL import Image

from cache_store.format.array import ImageRecipe, Size
from precompute.images.buckets import Placement, Sides, place
from precompute.images.rejected import Rejected, refuse_many_pixels, rejecting

MID_GREY = 128
"""Fills a rejected image's place in its batch, and the border of `pad`."""

RESAMPLING = {name: Image.Resampling[name.upper()] for name in ("bilinear", "bicubic", "lanczos", "box")}

REDUCTIONS = (8, 4, 2)
"""Factors by which libjpeg divides both sides at almost no cost, largest first."""
OVERSAMPLING = 2
"""Fewest pixels of a reduced image's side per pixel of the fitted one."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An upright RGB image, perhaps reduced while it was decoded."""

    rgb: Image.Image
    size: Sides
    reduction: int = 1
    """Pixels of the unreduced image, along each side, per pixel of `rgb`."""
    origin: tuple[float, float] = (0.0, 0.0)
    """Start of the image in `rgb`; above 0 if EXIF mirrors it: its partial last pixel then comes first."""
    exif_is_readable: bool = True
    """False if the image may be stored turned, and its EXIF cannot tell."""


def unreduced(rgb: Image.Image, exif_is_readable: bool = True) -> Decoded:
    return Decoded(rgb=rgb, size=rgb.size, exif_is_readable=exif_is_readable)


OTHER_BUCKET = "other bucket"
"""Kind of reject for an image that the rule does not place where planning did."""


def placement_of(size: Sides, recipe: ImageRecipe, planned: Size) -> Placement:
    """Place an image by the recipe's rule; Rejected unless that is in the planned size."""
    placement = place(recipe.rule, size)
    _, height, width = placement.bucket
    if (height, width) != planned[1:]:
        wanted = f"was planned for {planned.width}x{planned.height}"
        raise Rejected(OTHER_BUCKET, f"the image of {size[0]} x {size[1]} belongs to {width}x{height}, but {wanted}")
    if placement.seen is None:
        refuse_many_pixels(*placement.resized, recipe.max_pixels)  # 1,000,000 x 1 would become 256,000,000 x 256
    return placement


def reduction(size: Sides, recipe: ImageRecipe, planned: Size) -> int:
    if recipe.decode == "full":
        return 1
    placement = placement_of(size, recipe, planned)
    left, top, right, bottom = placement.seen or (0, 0, *size)
    columns, rows = placement.resized if placement.seen is None else (planned.width, planned.height)
    spare = min((right - left) / max(columns, 1), (bottom - top) / max(rows, 1)) / OVERSAMPLING
    return max((each for each in REDUCTIONS if each <= spare), default=1)


@rejecting()
def fit_image(image: Decoded, recipe: ImageRecipe, placement: Placement) -> Image.Image:
    """Scale and cut an image as it was placed; flip last, so that the result exactly mirrors the unflipped one."""
    target = (placement.bucket.width, placement.bucket.height)
    size = placement.resized if placement.seen is None else target
    edges = enumerate(placement.seen or (0, 0, *image.size))
    left, top, right, bottom = (edge / image.reduction + image.origin[axis % 2] for axis, edge in edges)
    if size == target:
        fitted = image.rgb.resize(size, RESAMPLING[recipe.resample], (left, top, right, bottom))
    else:
        ground = MID_GREY if recipe.rule.preset == "pad" else 0  # NeMo's rule may leave a pixel open
        fitted = Image.new("RGB", target, (ground,) * 3)
        if min(size) > 0:
            inner = image.rgb.resize(size, RESAMPLING[recipe.resample], (left, top, right, bottom))
            fitted.paste(inner, (-placement.crop[0], -placement.crop[1]))
    return fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if recipe.flip else fitted
