"""The pixels of every kind of image file, or the reason why it is rejected."""

import io
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from precompute.images.decode import ORIENTATIONS, SUFFIXES_OF, to_rgb
from precompute.images.fit import RESAMPLING, reduction, unreduced
from precompute.images.rejected import Rejected
from tests.precompute.images.fitting import FITS, decoded, fitted, recipe_of, size_of
from tests.precompute.images.hostile_images import png, png_chunk, save, tiff_around

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build


def decode(data: bytes, max_pixels: int = 10**6) -> np.ndarray:
    return np.asarray(decoded(data, recipe_of(max_pixels=max_pixels)).rgb)


def rejection(data: bytes) -> str:
    """Return the reason; check that it is one line without an address, so that every run gives the same."""
    with pytest.raises(Rejected) as rejected:
        decode(data)
    assert "\n" not in rejected.value.reason
    assert "0x" not in rejected.value.reason
    return rejected.value.reason


def gradient(height: int = 16, width: int = 24) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 255 // (height - 1), x * 255 // (width - 1), (x + y) % 256], axis=-1).astype(np.uint8)


def saved(pixels: np.ndarray, format_: str, **options: Any) -> bytes:
    """Save an image, lossless if the format has a choice."""
    return save(Image.fromarray(pixels), format_, **({"lossless": True} if format_ == "WEBP" else {}), **options)


def grey(levels: np.ndarray) -> np.ndarray:
    """Repeat levels as equal channels."""
    return np.repeat(np.atleast_2d(levels)[..., None], 3, axis=2)


def grey_tiff(levels: np.ndarray, width: int, tags: dict[int, int]) -> bytes:
    """Make a TIFF with the bits of `levels`; the tags' values are SHORT."""
    rows = levels.size // width
    numbers = {258: 8 * levels.itemsize, 278: rows, **tags}
    return tiff_around(levels.tobytes(), width, rows, {tag: (3, 1, number) for tag, number in numbers.items()})


def sixteen_bits(format_: str, order: str = "<") -> bytes:
    levels = LEVELS.astype(f"{order}u2") * 257
    return save(Image.frombytes("I;16" if order == "<" else "I;16B", (16, 16), levels.tobytes()), format_)


def upright(stored: np.ndarray, number: int) -> np.ndarray:
    """Turn by EXIF's number: 1 to 4 begin top left, top right, bottom right, bottom left; 5 to 8 also swap the axes."""
    number = number or 1  # EXIF has no 0
    down, right = ((1, 1), (1, -1), (-1, -1), (-1, 1))[(number - 1) % 4]
    return (stored.swapaxes(0, 1) if number > 4 else stored)[::down, ::right]


PIXELS, LEVELS = gradient(), np.arange(256).reshape(16, 16)
BLOCKS = np.kron(gradient(2, 3), np.ones((16, 16, 1), np.uint8))
"""Pixels that a lossy format keeps nearly unchanged."""
PNG = saved(PIXELS, "PNG")
HALF_RED = np.full((4, 4, 4), [255, 0, 0, 0], np.uint8)
HALF_RED[:2, :, 3] = 255
WHITE = np.full((8, 8, 3), 255)

LOSSY: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "MPO": {"quality": 95, "subsampling": 0, "save_all": True, "append_images": [Image.new("RGB", (8, 8))]},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},  # writes EXIF's orientation as boxes, irot and imir
}


def broken_exif() -> Iterator[tuple[str, bytes]]:
    """Yield kinds and files; Pillow can read their pixels but not their EXIF."""
    zeros = b"Exif\0\0" + bytes(8)
    for each in ("JPEG", "PNG", "WEBP"):
        yield each, saved(BLOCKS, each, exif=zeros, **LOSSY.get(each, {}))
    raw_profile = png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 8\nno hexadecimals\n")
    header, rest = saved(BLOCKS, "PNG")[:33], saved(BLOCKS, "PNG")[33:]
    yield "PNG with a raw profile", header + raw_profile + rest


def images() -> Iterator[tuple[Any, ...]]:
    """Yield kinds and files, with their pixels and the tolerance."""
    yield "GIF without loss", saved(PIXELS // 255 * 255, "GIF"), PIXELS // 255 * 255
    yield "grey", saved(LEVELS.astype(np.uint8), "PNG"), grey(LEVELS)
    yield "bilevel", save(Image.fromarray(LEVELS >= 128), "PNG"), grey(255 * (LEVELS >= 128))
    yield "cyan ink", save(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG", quality=95), WHITE * [0, 1, 1], 4
    row = struct.pack(">6H", 0x4455, 0x6677, 0x8899, 0x4400, 0x6600, 0x8800)
    of_16_bits = png(2, 1, colour=2, bits=16, data=zlib.compress(b"\0" + row))
    yield "16 bits a channel", of_16_bits, np.array([[[0x44, 0x66, 0x88]] * 2])
    twelve_bits = tiff_around(b"\0\x01\x23\x80\x0f\xff", 4, 1, {258: (3, 1, 12), 278: (3, 1, 1)})
    yield "a TIFF of 12 bits", twelve_bits, grey(np.array([0, 0x12, 0x80, 0xFF]))
    palette, expected = Image.frombytes("P", (2, 1), b"\0\1"), np.array([[[255] * 3, [200, 100, 50]]])
    palette.putpalette([10, 20, 30, 200, 100, 50])
    yield "a transparent entry of a palette", save(palette, "PNG", transparency=0), expected
    turned_off = np.where(np.all(PIXELS[3, 5] == PIXELS, axis=-1, keepdims=True), 255, PIXELS)
    yield "a transparent colour", saved(PIXELS, "PNG", transparency=tuple(PIXELS[3, 5].tolist())), turned_off
    for each in ("PNG", "BMP", "TIFF", "WEBP"):
        yield f"{each} without loss", saved(PIXELS, each), PIXELS
    for each in ("PNG", "WEBP"):
        yield f"{each} with alpha", saved(HALF_RED, each), np.where(HALF_RED[..., 3:], HALF_RED[..., :3], 255)
    for each in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
        first, second = (Image.new("RGB", (8, 8), colour) for colour in ("white", "blue"))
        yield f"the first frame of {each}", save(first, each, save_all=True, append_images=[second]), WHITE
    for each, order in (("PNG", "<"), ("TIFF", "<"), ("TIFF", ">")):
        yield f"{each} of 16 bits, {order}", sixteen_bits(each, order), grey(LEVELS)
    negative = grey_tiff(LEVELS.astype("<u2") * 257, 32, {262: 0, 274: 6})
    yield "a TIFF whose white is zero", negative, upright(grey(255 - LEVELS.reshape(8, 32)), 6)
    turned = saved(BLOCKS, "JPEG", xmp=b'<x tiff:Orientation="6"/>', **LOSSY["JPEG"])
    yield "a JPEG that XMP turns", turned, upright(BLOCKS, 6), 4
    for each, data in broken_exif():
        yield f"{each}, broken EXIF", data, BLOCKS, 4
    for each, number in product((*LOSSY, "PNG", "WEBP", "TIFF"), range(9)):
        exif, stored = Image.Exif(), BLOCKS if each in LOSSY else PIXELS
        exif[0x0112] = number
        data = saved(stored, each, exif=exif, **LOSSY.get(each, {}))
        yield f"{each}, orientation {number}", data, upright(stored, number), 4 * (each in LOSSY)


@pytest.mark.parametrize("image", list(images()), ids=lambda image: image[0])
def test_an_image_becomes_these_pixels(image):
    _, data, expected, *tolerance = image
    found = decode(data)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= sum(tolerance)


@pytest.mark.parametrize("decoding", ["full", "reduced"])
def test_an_image_says_whether_its_exif_could_be_read(decoding):
    recipe, exif = recipe_of(decode=decoding), Image.Exif()
    assert [name for name, data in broken_exif() if decoded(data, recipe).exif_is_readable] == []
    exif[0x010E] = "a description"
    sound = [saved(BLOCKS, each, exif=exif, **LOSSY.get(each, {})) for each in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")]
    assert all(decoded(data, recipe).exif_is_readable for data in (*sound, PNG))


REJECTED = {
    "signed or 32-bit integer pixels have no agreed range": [
        saved(np.array([[0, 255]], np.int32), "TIFF"),
        grey_tiff(LEVELS[3].astype("<i2"), 16, {339: 2}),
        grey_tiff(LEVELS[3].astype("<u4"), 16, {339: 1}),
    ],
    "unsupported pixels": [save(Image.new("F", (4, 4), 0.5), "TIFF")],
    "cannot decode": [(data := saved(gradient(64, 64), each))[: len(data) // 2] for each in SUFFIXES_OF],
}


@pytest.mark.parametrize(("reason", "data"), [(reason, data) for reason in REJECTED for data in REJECTED[reason]])
def test_what_is_cut_or_ambiguous_is_rejected(reason, data):
    assert reason in rejection(data)


def test_an_image_of_just_so_many_pixels_is_decoded():
    assert decode(PNG, 16 * 24).shape == (16, 24, 3)
    with pytest.raises(Rejected, match="^too large: 24 x 16 pixels, more than 383, or than 1,000,000 a side$"):
        decode(PNG, 16 * 24 - 1)


def test_an_image_made_rgb_in_strips_is_as_one_made_at_once():
    image = Image.fromarray(HALF_RED).resize((40, 50))
    for data in (save(image, "PNG"), save(image.convert("P"), "PNG", transparency=3), sixteen_bits("PNG", "<")):
        opened = Image.open(io.BytesIO(data))
        np.testing.assert_array_equal(to_rgb(opened, strip_pixels=100), to_rgb(opened))


def ftyp(brand: bytes, *others: bytes) -> bytes:
    names = brand + bytes(4) + b"".join(others)
    return struct.pack(">I", len(names) + 8) + b"ftyp" + names + bytes(100)


BEGINS = "begins as {}, but has no image that can be read"
NOT_IMAGES = {
    b"": "is empty",
    bytes(5_000): "holds only zero bytes",
    b"\r\n<!DOCTYPE html>\n<html></html>": r"is text, no image: '<!DOCTYPE html>\n<html></html>'",
    b"version https://git-lfs.github.com/spec/v1\n": BEGINS.format("a Git LFS pointer")
    + "; fetch the file itself with git lfs pull",
    ftyp(b"heic", b"mif1"): BEGINS.format("HEIC"),
    ftyp(b"isom", b"iso2", b"mp41"): BEGINS.format("MP4 or QuickTime"),
    save(Image.fromarray(PIXELS), "JPEG2000"): BEGINS.format("JPEG 2000"),
    b"\x01\x02\x03\x04" * 30: "is in no format of images that is read here",
}


@pytest.mark.parametrize("data", NOT_IMAGES, ids=lambda data: repr(data[:20]))
def test_a_file_that_is_no_image_is_named_for_what_it_is(data):
    assert rejection(data).startswith(f"cannot decode: {NOT_IMAGES[data]}")


# JPEGs that libjpeg reduces while decoding have nearly the same pixels.

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
    return save(image, "JPEG", exif=exif, quality=95, **options)


PHOTOGRAPHS = {
    **{f"orientation {number}": turned(photograph(), number) for number in (1, *ORIENTATIONS)},
    **{mode: turned(photograph(mode)) for mode in ("L", "CMYK")},
    "progressive": turned(photograph(), progressive=True),
    "whole colours": turned(photograph(), subsampling=0),
    "stereo": save(photograph(), "MPO", quality=95, save_all=True, append_images=[photograph()]),
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
    ("fit", "size", "expected"),
    [("squash", (3583, 3584), 4), ("crop", (895, 4000), 1), ("pad", (895, 4000), 8)],  # the last to 50 x 224
)
def test_twice_the_size_that_is_fitted_to_remains(fit, size, expected):
    recipe = recipe_of(fit=fit, decode="reduced")
    assert reduction(size, recipe, size_of(recipe)) == expected


OTHERS = {
    "no larger than twice": turned(photograph().resize((47, 31))),
    **{each: save(photograph(), each) for each in ("PNG", "WEBP", "TIFF")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_image_is_decoded_in_full(name):
    full, reduced = (decoded(OTHERS[name], recipe_of(16, 24, decode=decode)) for decode in ("full", "reduced"))
    assert np.array_equal(full.rgb, reduced.rgb)
    assert (full.size, full.reduction, full.origin) == (reduced.size, reduced.reduction, reduced.origin)


def test_an_image_that_is_not_reduced_is_fitted_as_by_pillow_and_mirrored_by_a_flip():
    """A side may be odd, so that crop and pad cannot be even."""
    by_pillow = {"squash": Image.Image.resize, "crop": ImageOps.fit, "pad": partial(ImageOps.pad, color=(128,) * 3)}
    rng = np.random.default_rng(0)
    for fit, filter_ in product(FITS, RESAMPLING):
        for _ in range(20):
            width, height, *target = rng.integers(1, 90, 4).tolist()
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
            recipe = recipe_of(target[1], target[0], fit=fit, resample=filter_)
            expected = by_pillow[fit](image, tuple(target), RESAMPLING[filter_])
            assert np.array_equal(fitted(unreduced(image), recipe), expected), (fit, filter_, image.size, target)
            flipped = fitted(unreduced(image), msgspec.structs.replace(recipe, flip=True))
            assert np.array_equal(flipped, np.asarray(expected)[:, ::-1])
