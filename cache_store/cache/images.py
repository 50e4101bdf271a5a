"""Read the images that a cache was made from, and encode new ones as its samples.

Only `precompute` can do that; it is imported by name when it is needed, so that caches can be read without it.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cache_store.errors import ConfigError, SourceError, install
from cache_store.format.array import ArraySpec
from cache_store.storage.store import Store

ReadImage = Callable[[str], tuple[Image.Image, str]]
"""Reads the image of a uri as the encoder saw it, and its file's SHA-256; SourceError if it cannot be read."""

EncodeImages = Callable[[Sequence[Path | str | Image.Image]], np.ndarray]
"""Encodes image files, or images that are fitted already: [N, *shape] in the array's dtype; SourceError, naming the
file, for one that a build rejects.
"""


def find_source_images(store: Store) -> ReadImage:
    """Open a reader of a cache's source images; EncodeOnceError says why there is none."""
    try:
        sources: Any = import_module("precompute.source_images")
    except ImportError as error:
        raise SourceError(f"sources cannot be read here: {error}; run {install('precompute')}") from None
    return sources.open_source_images(store)  # type: ignore[no-any-return]


def open_image_encoder(array: ArraySpec, model: str, device: str = "auto") -> EncodeImages:
    """Open the encoder of `array` from `model`, a hub id or a folder.

    Raises ConfigError if `precompute` cannot be loaded, and StaleError if the model is not the one that made `array`.
    """
    try:
        encoders: Any = import_module("precompute.encode_images")
        return encoders.open_encoder(array, model, device)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigError(f"images cannot be encoded here: {error}; run {install('precompute')}") from None
