"""Draw samples as pictures, and encode pictures as data URIs."""

# Axes: C channels, H W latent cells, T frames, S frames shown, Y X pixels, 3 RGB.

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from cache_store.format.array import ArraySpec
from cache_store.format.schema import PreviewMap

THUMBNAIL, FRAME_THUMBNAIL = 224, 160
"""Longest side in pixels of a picture on the page, and of each frame if there are several."""
MOST_FRAMES = 8
"""Most frames that are shown of a clip."""
FRAME_GAP = 1 / 80
"""White between two frames, as a share of a frame's width."""

JPEG_QUALITY = 88


def preview(latent_CTHW: np.ndarray, to_rgb: PreviewMap) -> np.ndarray:
    """Map every latent frame to RGB by the seal's linear map: uint8 [T, H, W, 3]."""
    weight_3C, bias_3 = np.array(to_rgb.weight), np.array(to_rgb.bias)
    rgb_THW3 = np.einsum("rc,c...->...r", weight_3C, latent_CTHW) + bias_3
    preview_THW3: np.ndarray = np.rint(np.clip(rgb_THW3, 0.0, 1.0) * 255).astype(np.uint8)
    return preview_THW3


def frames_shown(array: ArraySpec) -> int:
    # No more than latent frames, so that pictures below each other show the same moment.
    latent_frames = array.shape[1:-2] if array.has_preview else ()
    return min(MOST_FRAMES, array.size.frames, *latent_frames)


def choose_frames(frames_TYX3: np.ndarray, count: int) -> np.ndarray:
    frames = len(frames_TYX3)
    chosen_SYX3: np.ndarray = frames_TYX3[np.linspace(0, frames - 1, min(count, frames)).round().astype(int)]
    return chosen_SYX3


def side_by_side(pictures: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    height, width, _ = pictures[0].shape
    gap_YX3 = np.full((height, max(1, round(FRAME_GAP * width)), 3), 255, np.uint8)
    return np.concatenate([part for picture in pictures for part in (picture, gap_YX3)][:-1], axis=1)


def psnr(one_YX3: np.ndarray, other_YX3: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio of 8-bit pictures, in dB; infinity if they are equal."""
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


def png_uri(image_YX3: np.ndarray) -> str:
    return data_uri(Image.fromarray(image_YX3), "PNG", optimize=True)


def data_uri(image: Image.Image, form: str, **options: int) -> str:
    image.save(stream := io.BytesIO(), form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
