"""Decode an image file's bytes to upright RGB.

Image files are untrusted: formats are allow-listed, the pixel count and the number of parts that a decoder would walk
are limited before anything is decoded, and a truncated file fails instead of ending in grey. Only the first frame is
decoded. One image takes at most MEMORY_PER_PIXEL bytes for each of `max_pixels`, 8 for each of its file, and
MEMORY_AT_LEAST; each decode thread has one image in hand. An AVIF whose frames are larger than its header says is
the exception: libavif decodes frames of up to 2^28 pixels, some 2 GB, before it scales them.
"""

import ctypes
import hashlib
import logging
import warnings
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, UnidentifiedImageError, _imaging
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from cache_store.format.array import ImageRecipe, Size
from precompute.images.buckets import Sides
from precompute.images.config import ImageConfig
from precompute.images.fit import Decoded, reduction, unreduced
from precompute.images.not_images import describe_file
from precompute.images.parts import GIF, JPEG_MAGIC, MAX_EXIF_BYTES, CountedFile, refuse_costly
from precompute.images.rejected import ANY_ERROR, Rejected, refuse_many_pixels, rejecting


def silence_decoders() -> None:
    """Silence Pillow's warnings, about odd metadata, and libtiff's messages, from C, for the whole process."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    pillow = ctypes.CDLL(_imaging.__file__)  # it finds functions of the libraries that the module is linked to
    for handler in ("TIFFSetWarningHandler", "TIFFSetErrorHandler"):
        if hasattr(pillow, handler):  # not where libtiff is linked in statically
            getattr(pillow, handler)(None)  # libtiff's way of asking for silence


SUFFIXES_OF = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif", ".avifs"),
}
"""Suffixes of image files, by Pillow's name of the format; how a file is read is decided by its content alone."""
FORMATS = tuple(GIF if name == "GIF" else name for name in SUFFIXES_OF)
SUFFIXES = frozenset(suffix for suffixes in SUFFIXES_OF.values() for suffix in suffixes)

Image.MAX_IMAGE_PIXELS = None  # our own bound is checked first, from the header, and rejects instead of warning
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a build decodes several images at once by itself

MEMORY_PER_PIXEL = 32
"""Bytes. 19 were measured for an AVIF and 16 for a WebP with alpha, 12 for a progressive JPEG in CMYK, 4 for a PNG."""

MEMORY_AT_LEAST = 64 * 2**20
"""Bytes that an image may take however small it is: parts of its file as Python objects, decoders' buffers."""


class Orientation(NamedTuple):
    method: Image.Transpose | None = None
    exchanges_sides: bool = False
    mirrors: tuple[bool, bool] = (False, False)
    """Whether the upright image's columns, and its rows, are in the reverse of the stored order."""
    is_readable: bool = True


ORIENTATIONS = {
    2: Orientation(Image.Transpose.FLIP_LEFT_RIGHT, False, (True, False)),
    3: Orientation(Image.Transpose.ROTATE_180, False, (True, True)),
    4: Orientation(Image.Transpose.FLIP_TOP_BOTTOM, False, (False, True)),
    5: Orientation(Image.Transpose.TRANSPOSE, True, (False, False)),
    6: Orientation(Image.Transpose.ROTATE_270, True, (True, False)),
    7: Orientation(Image.Transpose.TRANSVERSE, True, (True, True)),
    8: Orientation(Image.Transpose.ROTATE_90, True, (False, True)),
}

UNREADABLE_EXIF = Orientation(is_readable=False)

ORIENTING = frozenset({"exif", "xmp"})

TOLD_BY_HEADER = frozenset({"PNG", "WEBP", "GIF", "BMP"})
"""Formats, besides JPEG, whose header tells the size that decoding gives."""


def content_sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@rejecting()
def decode_image(data: bytes, recipe: ImageRecipe, planned: Size) -> Decoded:
    """Decode to upright RGB; raise Rejected if that is impossible. The planned size says how far it may be reduced."""
    refuse_costly(data, recipe.max_pixels)
    try:
        with Image.open(CountedFile(data), formats=FORMATS) as image:
            refuse_many_pixels(*image.size, recipe.max_pixels)
            if recipe.decode == "reduced" and isinstance(image, JpegImageFile):
                return decode_reduced(image, recipe, planned)
            image.load()
            if is_plain(image):
                return unreduced(image)
            turn = orientation_of(image)
            return unreduced(to_rgb(turn_upright(with_true_levels(image), turn)), turn.is_readable)
    except UnidentifiedImageError:
        raise Rejected("cannot decode", describe_file(data, "image")) from None


def size_from_head(head: bytes) -> Sides | None:
    """Return the upright size of a JPEG by its first bytes, if they tell it."""
    if not head.startswith(JPEG_MAGIC):
        return None
    try:
        with Image.open(BytesIO(head), formats=("JPEG", "MPO")) as image:
            return upright(image.size, orientation_of(image))
    except ANY_ERROR:
        return None


def size_of(data: bytes, max_pixels: int) -> Sides | None:
    """Return the upright size of an image, decoded if its header may not tell it; None if it cannot be read."""
    try:
        refuse_costly(data, max_pixels)
        if size := size_from_head(data):
            return size
        with Image.open(CountedFile(data), formats=FORMATS) as image:
            if image.format in TOLD_BY_HEADER:
                refuse_many_pixels(*image.size, max_pixels)
                return upright(image.size, orientation_of(image))
        return decode_image(data, ImageConfig(max_pixels=max_pixels).recipe, Size(1, 1, 1)).size
    except ANY_ERROR:
        return None


def upright(size: Sides, turn: Orientation) -> Sides:
    return (size[1], size[0]) if turn.exchanges_sides else size


def decode_reduced(image: JpegImageFile, recipe: ImageRecipe, planned: Size) -> Decoded:
    (width, height), turn = image.size, orientation_of(image)
    size = upright(image.size, turn)
    factor = reduction(size, recipe, planned)
    if factor > 1:
        image.draft(None, (width // factor, height // factor))
    image.load()
    rgb = to_rgb(turn_upright(image, turn))
    outside = (pixels - side / factor for pixels, side in zip(rgb.size, size, strict=True))
    origin_x, origin_y = (part * mirrored for part, mirrored in zip(outside, turn.mirrors, strict=True))
    return Decoded(rgb=rgb, size=size, reduction=factor, origin=(origin_x, origin_y), exif_is_readable=turn.is_readable)


def orientation_of(image: Image.Image) -> Orientation:
    """Return the orientation of EXIF, else of XMP; `UNREADABLE_EXIF` if the EXIF is broken."""
    if len(image.info.get("exif", b"")) > MAX_EXIF_BYTES:
        raise Rejected("too many parts", f"more than {MAX_EXIF_BYTES:,} bytes of EXIF")
    try:
        Image.Exif().load(image.info.get("exif", b""))  # Pillow has read a JPEG's and forgotten its error
        return ORIENTATIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1), Orientation())
    except ANY_ERROR:
        return UNREADABLE_EXIF


def is_plain(image: Image.Image) -> bool:
    """Return whether an image is an RGB JPEG without orientation, as most are, which needs no conversion."""
    return isinstance(image, JpegImageFile) and image.mode == "RGB" and ORIENTING.isdisjoint(image.info)


def turn_upright(image: Image.Image, turn: Orientation) -> Image.Image:
    """Turn an image without a copy, and without changing EXIF, as Pillow's `exif_transpose` does."""
    return image if turn.method is None else image.transpose(turn.method)


# Pixels of any mode become RGB; Pillow's own conversion is wrong for some.

SIXTEEN_BIT_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})

WITHOUT_RANGE = {"I": "signed or 32-bit integer", "F": "floating-point"}
"""Modes whose files do not say which number is black and which is white."""

STRIP_PIXELS = 2**20
"""Images are converted in strips of so many pixels, so that steps between need little memory."""

TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262
TIFF_WHITE_IS_ZERO = 0


def with_true_levels(image: Image.Image) -> Image.Image:
    """Correct the levels of a 16-bit grey TIFF, which Pillow leaves as 12 bits, or inverted."""
    if isinstance(image, TiffImageFile) and image.mode == "I;16":
        if image.tag_v2.get(TIFF_BITS) == (12,):
            return image.point(lambda level: level * 16.0 + 0.0)
        if image.tag_v2.get(TIFF_PHOTOMETRIC, TIFF_WHITE_IS_ZERO) == TIFF_WHITE_IS_ZERO:  # Pillow's default too
            return image.point(lambda level: level * -1.0 + 65_535.0)
    return image


def to_rgb(image: Image.Image, strip_pixels: int = STRIP_PIXELS) -> Image.Image:
    """Convert any mode of Pillow to RGB: 16-bit grey by its high byte, alpha over white, CMYK as Pillow converts it."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb, rows = Image.new("RGB", image.size), max(1, strip_pixels // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        rgb.paste(strip_to_rgb(strip), (0, top))
    return rgb


def strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in SIXTEEN_BIT_MODES:
        image = high_byte(image)
    elif image.mode in WITHOUT_RANGE:
        raise Rejected("unsupported pixels", f"{WITHOUT_RANGE[image.mode]} pixels have no agreed range")
    if image.mode == "La":
        image = image.convert("LA")  # the only mode that Pillow makes of it
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        ground = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(ground, rgba).convert("RGB")
    return image.convert("RGB")


def high_byte(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8-bit grey; Pillow's own conversion of some of these modes clips at 255 instead."""
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # PNG's one transparent level, of 65,536
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
