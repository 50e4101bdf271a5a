"""Draw samples as pictures, and encode pictures as data URIs."""

# Axes: C channels, H W latent cells, T frames, S frames shown, Y X pixels, 3 RGB.

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from cache_store.format.array import ArraySpec
from cache_store.format.schema import ArraySummary, PreviewMap

THUMBNAIL, FRAME_THUMBNAIL = 224, 160
"""Longest side in pixels of a picture on the page, and of each frame if there are several."""
MOST_FRAMES = 8
"""Most frames that are shown of a clip."""
FRAME_GAP = 1 / 80
"""White between two frames, as a share of a frame's width."""

STRIP_TILES = 8
"""Most channels in one line of a strip; wide maps get fewer, or they would be too thin to see."""
STRIP_GAP = 2
STRIP_SPAN = 3.0
"""A strip's colours reach this many of the channel's standard deviations on either side of its mean."""
BLUE_WHITE_RED = ((33, 102, 172), (247, 247, 247), (178, 24, 43))

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
    shades = (np.interp(np.arange(255), (0, 127, 254), ends) for ends in zip(*BLUE_WHITE_RED, strict=True))
    image.putpalette([*np.stack([*shades], axis=1).round().astype(int).ravel().tolist(), 255, 255, 255])
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
    lines, step_y, step_x = -(-channels // columns), height + STRIP_GAP, width + STRIP_GAP
    sheet = np.full((lines * columns, step_y, step_x), gap, np.uint8)
    sheet[:channels, :height, :width] = level_CHW
    sheet = sheet.reshape(lines, columns, step_y, step_x).swapaxes(1, 2).reshape(lines * step_y, columns * step_x)
    return sheet[:-STRIP_GAP, :-STRIP_GAP]


def psnr(one_YX3: np.ndarray, other_YX3: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio of 8-bit pictures in dB; infinity if they are equal."""
    error = np.square(one_YX3.astype(np.float64) - other_YX3).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def thumbnails(frames_SYX3: np.ndarray) -> np.ndarray:
    """Shrink frames and put them side by side; an image, a single frame, may be larger."""
    side, small = max(FRAME_THUMBNAIL, THUMBNAIL // len(frames_SYX3)), list[np.ndarray]()
    for frame_YX3 in frames_SYX3:
        image = Image.fromarray(frame_YX3)
        image.thumbnail((side, side), Image.Resampling.BOX)
        small.append(np.asarray(image))
    return side_by_side(small)


def jpeg_uri(image_YX3: np.ndarray) -> str:
    return data_uri(Image.fromarray(image_YX3), "JPEG", quality=JPEG_QUALITY)


def png_uri(image: Image.Image | np.ndarray) -> str:
    """Encode a picture without loss as a PNG data URI."""
    return data_uri(image if isinstance(image, Image.Image) else Image.fromarray(image), "PNG", optimize=True)


def data_uri(image: Image.Image, form: str, **options: int) -> str:
    image.save(stream := io.BytesIO(), form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
