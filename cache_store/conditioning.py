"""A diffusion model's inputs about an image's size and crop, from the columns of a samples table."""

# Axes: N samples.

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from cache_store.errors import ConfigError

COLUMNS = ("width", "height", "crop_left", "crop_top")


def time_ids(
    samples: pa.Table | Mapping[str, ArrayLike],
    bucket: ArrayLike,
    crops: Literal["diffusers", "sd-scripts"] = "diffusers",
) -> NDArray[np.int64]:
    """Return SDXL's six numbers, [N, 6]: original height and width, crop top and left, target height and width.

    `samples` has the columns `width`, `height`, `crop_left` and `crop_top`; `bucket` is (height, width), of all samples
    or [N, 2]. diffusers records the crop in the scaled image. sd-scripts records the border that the whole image would
    have inside the bucket, `letterbox`. ConfigError for anything else.
    """
    width, height = column(samples, "width"), column(samples, "height")
    if np.shape(bucket) not in ((2,), (len(width), 2)):
        raise ConfigError(f"time_ids: expected a bucket (height, width), or [{len(width)}, 2], got {bucket!r}")
    target_N2 = np.broadcast_to(np.asarray(bucket, np.int64), (len(width), 2))
    if crops == "sd-scripts":
        left, top, _, _ = letterbox(width, height, target_N2).T
    elif crops == "diffusers":
        left, top = column(samples, "crop_left"), column(samples, "crop_top")
    else:
        raise ConfigError(f"crops must be diffusers or sd-scripts, got {crops!r}")
    return np.column_stack([height, width, top, left, target_N2]).astype(np.int64)


def letterbox(width: ArrayLike, height: ArrayLike, bucket: ArrayLike) -> NDArray[np.float64]:
    """Return [N, 4]: left, top, right and bottom of whole images inside their buckets, (height, width), in pixels.

    sd-scripts names it crop_ltrb; it is not the crop that sd-scripts takes. Left and top are whole numbers.
    """
    rows, columns = np.asarray(bucket, np.float64).T
    aspect = np.asarray(width) / np.asarray(height)
    is_wider = columns / rows > aspect  # the bucket
    inner_width, inner_height = np.where(is_wider, rows * aspect, columns), np.where(is_wider, rows, columns / aspect)
    left, top = (columns - inner_width) // 2, (rows - inner_height) // 2
    return np.column_stack([left, top, left + inner_width, top + inner_height])


def column(samples: pa.Table | Mapping[str, Any], name: str) -> NDArray[np.int64]:
    try:
        return np.asarray(samples[name], np.int64)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"time_ids: {name} has no whole numbers; expected columns {', '.join(COLUMNS)}") from None
