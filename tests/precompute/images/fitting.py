"""Images decoded and fitted to the one size of a recipe."""

from typing import Any

from PIL import Image

from cache_store.format.array import ImageRecipe, Size
from precompute.images.config import ImageConfig
from precompute.images.decode import decode_image
from precompute.images.fit import Decoded, fit_image, placement_of

FITS = ("squash", "crop", "pad")


def recipe_of(height: int = 224, width: int = 224, max_pixels: int = 10**6, **fields: Any) -> ImageRecipe:
    return ImageConfig(height=height, width=width, max_pixels=max_pixels, **fields).recipe


def size_of(recipe: ImageRecipe) -> Size:
    ((width, height),) = recipe.rule.sizes
    return Size(1, height, width)


def decoded(data: bytes, recipe: ImageRecipe) -> Decoded:
    return decode_image(data, recipe, size_of(recipe))


def fitted(image: Decoded, recipe: ImageRecipe) -> Image.Image:
    return fit_image(image, recipe, placement_of(image.size, recipe, size_of(recipe)))
