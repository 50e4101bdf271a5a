"""New images as a cache's samples, made by the package that has the encoder.

`cache_store` knows no encoders. A package that does (`precompute`) names, in the entry point group
`encode_once.encoder`, a function that opens one, so that a program which only knows the cache can use it.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
from PIL import Image

from cache_store.errors import ConfigError, install
from cache_store.format.schema import ArraySpec

GROUP = "encode_once.encoder"

EncodeImages = Callable[[Sequence[Path | str | Image.Image]], np.ndarray]
"""From image files, or images fitted already, to [N, *shape] in the array's dtype; SourceError, naming the file, for
one that a build rejects."""

OpenEncoder = Callable[[ArraySpec, str, str], EncodeImages]
"""From a cache's array, the model of its encoder and a device; StaleError where the model is another one."""


def open_image_encoder(array: ArraySpec, model: str, device: str = "auto") -> EncodeImages:
    """Open the encoder that made `array`, from `model`, a hub id or a folder; ConfigError where no package has any."""
    opener = next(iter(entry_points(group=GROUP)), None)
    if opener is None:
        raise ConfigError(f"no installed package encodes images; run {install('precompute')}")
    try:
        open_encoder: OpenEncoder = opener.load()
        return open_encoder(array, model, device)
    except ImportError as error:
        raise ConfigError(f"images cannot be encoded here: {error}; run {install('precompute')}") from None
