"""Files of the kinds that a real data set hides: some broken, some merely unusual.

The broken ones must be rejected with a reason; the unusual ones must decode to the same scene as any other.
"""

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from demo.scenes import Scene, draw

ORIENTATION_TAG, TURN_CLOCKWISE = 0x0112, 6
"""EXIF's orientation: show the stored picture turned by 90 degrees clockwise."""


@dataclass(frozen=True, kw_only=True)
class SpecialFile:
    """A way to make one kind of file from a scene."""

    suffix: str
    write: Callable[[Scene], bytes | None]
    """None: the file is missing."""
    recolour: tuple[str, str] | None = None
    """Colours for both things, if this kind of file cannot hold all colours."""


def jpeg(scene: Scene) -> bytes:
    return encode_image(draw(scene), "JPEG", quality=92, subsampling=0)


def encode_image(image: Image.Image, image_format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()


def truncated(scene: Scene) -> bytes:
    whole = jpeg(scene)
    return whole[: len(whole) // 2]


def too_many_pixels(scene: Scene) -> bytes:
    """Make a PNG of some dozen bytes that claims 10 gigapixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(data)) + kind + data for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk + struct.pack(">I", zlib.crc32(chunk[4:])) for chunk in chunks)


def exif_rotated(scene: Scene) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = TURN_CLOCKWISE
    lying = draw(scene).transpose(Image.Transpose.ROTATE_90)
    return encode_image(lying, "JPEG", quality=92, subsampling=0, exif=exif)


def cmyk(scene: Scene) -> bytes:
    return encode_image(draw(scene).convert("CMYK"), "JPEG", quality=92)


def grey_16_bit(scene: Scene) -> bytes:
    grey = np.asarray(draw(scene).convert("L"), np.uint16)
    return encode_image(Image.fromarray(grey * 257), "PNG")


def palette_transparent(scene: Scene) -> bytes:
    """Write the image in 32 colours, with the ground's colours transparent, so that the things lie on white."""
    palette = draw(scene).quantize(32)
    colours = np.array(palette.getpalette()).reshape(-1, 3)
    is_ground = np.ptp(colours, axis=1) < 60
    return encode_image(palette, "PNG", transparency=bytes(np.where(is_ground, 0, 255).astype(np.uint8)))


NOT_AN_IMAGE = b"<html><body>404: the image is no longer here</body></html>\n"

BROKEN: dict[str, SpecialFile] = {
    "truncated": SpecialFile(suffix="jpg", write=truncated),
    "not-an-image": SpecialFile(suffix="jpg", write=lambda scene: NOT_AN_IMAGE),
    "empty": SpecialFile(suffix="jpg", write=lambda scene: b""),
    "missing": SpecialFile(suffix="jpg", write=lambda scene: None),
    "too-many-pixels": SpecialFile(suffix="png", write=too_many_pixels),
}

UNUSUAL: dict[str, SpecialFile] = {
    "exif-rotated": SpecialFile(suffix="jpg", write=exif_rotated),
    "cmyk": SpecialFile(suffix="jpg", write=cmyk),
    "grey-16-bit": SpecialFile(suffix="png", write=grey_16_bit, recolour=("white", "black")),
    "palette-transparent": SpecialFile(suffix="png", write=palette_transparent, recolour=("red", "blue")),
}


def recoloured(scene: Scene, special: SpecialFile) -> Scene:
    """Return the scene in colours that this kind of file can hold."""
    if special.recolour is None:
        return scene
    first, second = special.recolour
    return replace(scene, first=replace(scene.first, colour=first), second=replace(scene.second, colour=second))
