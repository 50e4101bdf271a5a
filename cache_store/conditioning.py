"""A diffusion model's inputs about an image's size and crop, from the columns of a samples table."""

# Axes: N samples.

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from cache_store.errors import ConfigError

COLUMNS = ("width", "height", "crop_left", "crop_top")


def time_ids(samples: pa.Table | Mapping[str, ArrayLike], bucket: ArrayLike) -> NDArray[np.int64]:
    """Return SDXL's six numbers, [N, 6]: original height and width, crop top and left, target height and width.

    `samples` has the columns `width`, `height`, `crop_left` and `crop_top`, the crop in the scaled image, as in
    diffusers; `bucket` is (height, width), of all samples or [N, 2]. ConfigError for anything else.
    """
    width, height, left, top = (column(samples, name) for name in COLUMNS)
    if np.shape(bucket) not in ((2,), (len(width), 2)):
        raise ConfigError(f"time_ids: expected a bucket (height, width), or [{len(width)}, 2], got {bucket!r}")
    target_N2 = np.broadcast_to(np.asarray(bucket, np.int64), (len(width), 2))
    return np.column_stack([height, width, top, left, target_N2]).astype(np.int64)


def column(samples: pa.Table | Mapping[str, Any], name: str) -> NDArray[np.int64]:
    try:
        return np.asarray(samples[name], np.int64)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"time_ids: {name} has no whole numbers; expected columns {', '.join(COLUMNS)}") from None
