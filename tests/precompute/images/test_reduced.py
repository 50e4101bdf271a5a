"""JPEGs that libjpeg reduces while decoding have nearly the same pixels, and the same rejections."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from PIL import Image, ImageOps

from precompute.images.decode import ORIENTATIONS
from precompute.images.fit import RESAMPLING, reduction, unreduced
from tests.precompute.images import hostile_images as hostile
from tests.precompute.images.fitting import FITS, decoded, fitted, recipe_of, size_of

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build

HEIGHT, WIDTH = 403, 541
"""Size of a photograph; neither side is a multiple of 2, 4 or 8."""


def photograph(mode: str = "RGB") -> Image.Image:
    """Make an image of waves, in which a shift by half a fitted pixel shows."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(x / 23 + y / 71), np.cos(x / 61 - y / 29), np.sin((x + y) / 37)]
    return Image.fromarray((127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)).convert(mode)


def turned(image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return hostile.save(image, "JPEG", exif=exif, quality=95, **options)


PHOTOGRAPHS = {
    **{f"orientation {number}": turned(photograph(), number) for number in (1, *ORIENTATIONS)},
    **{mode: turned(photograph(mode)) for mode in ("L", "CMYK")},
    "progressive": turned(photograph(), progressive=True),
    "whole colours": turned(photograph(), subsampling=0),
    "stereo": hostile.save(photograph(), "MPO", quality=95, save_all=True, append_images=[photograph()]),
}


@pytest.mark.parametrize(("fit", "name"), [*product(FITS, PHOTOGRAPHS)])
def test_a_reduced_jpeg_gives_nearly_the_same_pixels(fit, name):
    """No edge is shifted, although EXIF may turn a partial pixel to any of them."""
    for height, width in ((50, 50), (20, 25)):
        recipes = [recipe_of(height, width, fit=fit, decode=decode) for decode in ("full", "reduced")]
        full, reduced = (decoded(PHOTOGRAPHS[name], recipe) for recipe in recipes)
        assert reduced.size == full.size == full.rgb.size
        assert reduced.reduction > full.reduction == 1
        pixels = [np.asarray(fitted(*each), int) for each in zip((full, reduced), recipes, strict=True)]
        apart = np.abs(np.subtract(*pixels))
        assert apart.max() <= 8
        assert apart.mean() < 1


@pytest.mark.parametrize(
    ("fit", "size", "target", "expected"),
    [
        ("squash", (1792, 1792), (224, 224), 4),
        ("squash", (3584, 3584), (224, 224), 8),
        ("squash", (3583, 3584), (224, 224), 4),
        ("crop", (895, 4000), (224, 224), 1),
        ("crop", (896, 4000), (224, 224), 2),
        ("pad", (895, 4000), (224, 224), 8),  # fitted to 50 x 224
    ],
)
def test_twice_the_size_that_is_fitted_to_remains(fit, size, target, expected):
    width, height = target
    for decode, factor in (("reduced", expected), ("full", 1)):
        recipe = recipe_of(height, width, fit=fit, decode=decode)
        assert reduction(size, recipe, size_of(recipe)) == factor


OTHERS = {
    "no larger than twice": turned(photograph().resize((47, 31))),
    **{each: hostile.save(photograph(), each) for each in ("PNG", "WEBP", "TIFF")},
    "TIFF of JPEG": hostile.save(photograph(), "TIFF", compression="jpeg"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_image_is_decoded_in_full(name):
    full, reduced = (decoded(OTHERS[name], recipe_of(16, 24, decode=decode)) for decode in ("full", "reduced"))
    assert np.array_equal(full.rgb, reduced.rgb)
    assert (full.size, full.reduction, full.origin) == (reduced.size, reduced.reduction, reduced.origin)


def test_an_image_that_is_not_reduced_is_fitted_as_by_pillow():
    by_pillow = {"squash": Image.Image.resize, "crop": ImageOps.fit, "pad": partial(ImageOps.pad, color=(128,) * 3)}
    rng = np.random.default_rng(0)
    for fit, filter_ in product(FITS, RESAMPLING):
        for _ in range(20):
            width, height, *target = rng.integers(1, 90, 4).tolist()
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
            recipe = recipe_of(target[1], target[0], fit=fit, resample=filter_)
            expected = by_pillow[fit](image, tuple(target), RESAMPLING[filter_])
            assert np.array_equal(fitted(unreduced(image), recipe), expected), (fit, filter_, image.size, target)
