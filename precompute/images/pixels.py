"""Convert any of Pillow's modes to RGB; its own conversion is wrong for some."""

import numpy as np
from PIL import Image, TiffImagePlugin

from precompute.images.rejected import Rejected

SIXTEEN_BIT_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
"""Unsigned modes of PNG and TIFF, in any byte order."""

WITHOUT_RANGE = {"I": "signed or 32-bit integer", "F": "floating-point"}
"""Modes whose files do not say which number is black and which is white."""

STRIP_PIXELS = 2**20
"""Images are converted in strips of about this many pixels, so that intermediate steps need little memory."""

TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262
TIFF_WHITE_IS_ZERO = 0


def with_true_levels(image: Image.Image) -> Image.Image:
    """Correct the levels of a grey TIFF of more than 8 bits, which Pillow leaves as 12 bits, or inverted."""
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.mode == "I;16":
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
