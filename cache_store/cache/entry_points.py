"""Read the images that a cache was made from, and encode new ones as its samples.

A package that can do this names its functions as entry points in GROUP, as `precompute` does in setup.cfg. Reading a
cache does not need one.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_store.errors import ConfigError, SourceError, install
from cache_store.format.array import ArrayRecipe, ArraySpec
from cache_store.storage.store import Store

GROUP = "encode_once.images"

Frames = NDArray[np.uint8]
"""RGB of a sample's frames: [T, Y, X, 3]."""

ReadImage = Callable[[Mapping[str, Any], ArraySpec], tuple[Frames, str]]
"""Reads the frames of a sample, which has the plan's columns, as the array's encoder saw them: and its
file's SHA-256; raises SourceError for one that cannot be read.
"""

EncodeImages = Callable[[Sequence[Path | str | Frames]], list[np.ndarray]]
"""Encodes files, or frames that are fitted already: a sample [*shape] of each, as the cache would give it; SourceError,
naming the file, for one that a build rejects.
"""


def find_source_images(store: Store) -> ReadImage:
    """Open a reader of a cache's source images; EncodeOnceError says why there is none."""
    try:
        open_images = load_function("open_source_images")
    except ImportError as error:
        raise SourceError(f"sources cannot be read here: {error}; run {install('precompute')}") from None
    return open_images(store)  # type: ignore[no-any-return]


def open_image_encoder(array: ArrayRecipe, model: str) -> EncodeImages:
    """Open the encoder of arrays of this recipe from `model`, a hub id or a folder.

    Raises ConfigError if no encoder can be loaded, and StaleError if the model is not the one that made them.
    """
    try:
        return load_function("open_encoder")(array, model)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigError(f"images cannot be encoded here: {error}; run {install('precompute')}") from None


def load_function(name: str) -> Any:
    """Load a function from the package that has it; ImportError if that, or what it needs, is not installed."""
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise ImportError(f"no installed package has {GROUP}:{name}")
