"""Draw latents as pictures, and encode pictures as data URIs."""

# Axes: C channels, H W latent cells, T frames, S frames shown, Y X pixels, 3 RGB.

import base64
import io
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from PIL import Image

from cache_store.format.array import ArraySpec
from cache_store.format.schema import ArraySummary, PreviewMap

THUMBNAIL = 224
"""Longest side of a photograph on the page, in pixels."""
FRAME_THUMBNAIL = 160
"""The same of a clip's frame, of which a strip has several."""
MOST_FRAMES = 8
"""Most frames that are shown of a clip."""
FRAME_GAP = 1 / 80
"""White between two frames, as a share of a frame's width."""

STRIP_TILES = 8
"""Most channels in one line of a strip; wide maps get fewer, or they would be too thin to see."""
STRIP_GAP = 2
STRIP_SPAN = 3.0
"""A strip's colours reach this many of the channel's standard deviations on either side of its mean."""
STRIP_COLOURS = "RdBu_r"

ERROR_SPAN = 64
"""8-bit levels at which an error map is at its brightest."""
ERROR_COLOURS = "inferno"

JPEG_QUALITY = 88


def preview(latent_CTHW: np.ndarray, to_rgb: PreviewMap) -> np.ndarray:
    """Map every latent frame to RGB by the seal's linear map: uint8 [T, H, W, 3]."""
    weight_3C, bias_3 = np.array(to_rgb.weight), np.array(to_rgb.bias)
    rgb_THW3 = np.einsum("rc,c...->...r", weight_3C, latent_CTHW) + bias_3
    preview_THW3: np.ndarray = np.rint(np.clip(rgb_THW3, 0.0, 1.0) * 255).astype(np.uint8)
    return preview_THW3


def frames_shown(array: ArraySpec) -> int:
    """Return the number of frames in a strip: no more than latent frames, so that pictures below each other show the
    same moment.
    """
    latent_frames = array.shape[1:-2] if array.has_preview else ()
    return min(MOST_FRAMES, array.size.frames, *latent_frames)


def choose_frames(frames_TYX3: np.ndarray, count: int) -> np.ndarray:
    """Choose frames, evenly spread, with the first and the last."""
    frames = len(frames_TYX3)
    chosen_SYX3: np.ndarray = frames_TYX3[np.linspace(0, frames - 1, min(count, frames)).round().astype(int)]
    return chosen_SYX3


def side_by_side(pictures: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Put pictures of one size into one, with white gaps between them."""
    height, width, _ = pictures[0].shape
    gap_YX3 = np.full((height, max(1, round(FRAME_GAP * width)), 3), 255, np.uint8)
    return np.concatenate([part for picture in pictures for part in (picture, gap_YX3)][:-1], axis=1)


def channel_strip(latent_CHW: np.ndarray, summary: ArraySummary) -> Image.Image:
    """Draw every channel as a small map, scaled by its mean and deviation over the cache.

    The palette has 255 colours; the 256th entry, transparent white, is the gap between maps.
    """
    mean_C, std_C = np.array(summary.mean), np.array(summary.std)
    score_CHW = (latent_CHW - mean_C[:, None, None]) / np.where(std_C > 0, std_C, 1.0)[:, None, None]
    level_CHW = np.rint((np.clip(score_CHW / STRIP_SPAN, -1, 1) + 1) * 127).astype(np.uint8)
    image = Image.fromarray(tiles(level_CHW, strip_columns(*level_CHW.shape[1:]), gap=255), "P")
    image.putpalette([*colour_table(STRIP_COLOURS, 255).ravel().tolist(), 255, 255, 255])
    image.info["transparency"] = 255
    return image


def strip_columns(height: int, width: int) -> int:
    """Choose the maps per line: a power of two, so that lines are full; a strip of 16 maps is 4:1 or flatter."""
    power = math.ceil(math.log2(STRIP_TILES / math.sqrt(width / height)))
    return min(STRIP_TILES, 1 << max(0, power))


def tiles(level_CHW: np.ndarray, columns: int, gap: int) -> np.ndarray:
    """Arrange the maps in lines of at most `columns`, with a gap between them."""
    channels, height, width = level_CHW.shape
    columns = min(channels, columns)
    lines = math.ceil(channels / columns)
    step_y, step_x = height + STRIP_GAP, width + STRIP_GAP
    sheet = np.full((lines * step_y - STRIP_GAP, columns * step_x - STRIP_GAP), gap, np.uint8)
    for channel, level_HW in enumerate(level_CHW):
        y, x = channel // columns * step_y, channel % columns * step_x
        sheet[y : y + height, x : x + width] = level_HW
    return sheet


def colour_table(name: str, colours: int) -> np.ndarray:
    """Return a colour map of matplotlib: uint8 [colours, 3]."""
    table = np.asarray(matplotlib.colormaps[name](np.linspace(0, 1, colours), bytes=True))
    return table[:, :3]


def error_map(one_YX3: np.ndarray, other_YX3: np.ndarray) -> np.ndarray:
    """Draw the mean absolute difference over RGB in false colours: uint8 [..., Y, X, 3]."""
    error_YX = np.abs(one_YX3.astype(np.float32) - other_YX3).mean(-1)
    level_YX = np.rint(np.minimum(error_YX / ERROR_SPAN, 1.0) * 255).astype(np.uint8)
    shown_YX3: np.ndarray = colour_table(ERROR_COLOURS, 256)[level_YX]
    return shown_YX3


def psnr(one_YX3: np.ndarray, other_YX3: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio of 8-bit pictures in dB; infinity if they are equal."""
    error = np.square(one_YX3.astype(np.float64) - other_YX3).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def thumbnails(frames_SYX3: np.ndarray) -> np.ndarray:
    """Shrink frames and put them side by side; an image, a single frame, may be larger."""
    side = THUMBNAIL if len(frames_SYX3) == 1 else FRAME_THUMBNAIL
    return side_by_side([thumbnail(frame, side) for frame in frames_SYX3])


def thumbnail(image_YX3: np.ndarray, side: int) -> np.ndarray:
    """Shrink an image to at most `side` pixels on its longest side."""
    image = Image.fromarray(image_YX3)
    image.thumbnail((side, side), Image.Resampling.BOX)
    return np.asarray(image)


def jpeg_uri(image_YX3: np.ndarray) -> str:
    """Encode a photograph as a JPEG data URI."""
    stream = io.BytesIO()
    Image.fromarray(image_YX3).save(stream, "JPEG", quality=JPEG_QUALITY)
    return data_uri("image/jpeg", stream.getvalue())


def png_uri(image: Image.Image | np.ndarray) -> str:
    """Encode a picture without loss as a PNG data URI."""
    stream = io.BytesIO()
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    image.save(stream, "PNG", optimize=True)
    return data_uri("image/png", stream.getvalue())


def data_uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
