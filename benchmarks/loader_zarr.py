"""Zarr's own readers of a cache's array, used as documented: zarr-python, zarr-python with zarrs, and TensorStore.

Each checks every sample's crc32c, which is a codec of the array.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Read = Callable[[Any], NDArray[np.float16]]
"""Reads sample numbers [N], or a slice of them, as a batch [N, C, H, W]."""


def by_zarr_python(array: Path) -> Read:
    """Read by orthogonal selection of sorted numbers, which takes half as long as of unsorted ones."""
    import zarr

    stored: Any = zarr.open_array(str(array), mode="r")
    return lambda numbers: stored[numbers] if isinstance(numbers, slice) else stored.oindex[np.sort(numbers)]


def by_zarrs(array: Path) -> Read:
    """Read by zarr-python with the codec pipeline of zarrs, in Rust."""
    import zarr

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return by_zarr_python(array)


def by_tensorstore(array: Path) -> Read:
    """Read by the driver zarr3 with its own threads, without checking whether metadata and shards have changed."""
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
    opened = tensorstore.open(spec, read=True, recheck_cached_metadata="open", recheck_cached_data="open").result()
    return lambda numbers: np.asarray(opened[numbers].read().result())


READERS: dict[str, tuple[str, Callable[[Path], Read]]] = {
    "zarr-python": ("zarr", by_zarr_python),
    "zarr-python with zarrs": ("zarrs", by_zarrs),
    "TensorStore": ("tensorstore", by_tensorstore),
}
"""Each reader's package, and the function that opens an array with it."""

MISSING = {
    name: f"{package} is not installed; run `pip install 'encode-once[dev]'`"
    for name, (package, _) in READERS.items()
    if find_spec(package) is None
}


def installed_readers(array: Path) -> dict[str, Read]:
    """Open the array with each installed reader; a broken package is named by its import error."""
    return {name: opened(array) for name, (_, opened) in READERS.items() if name not in MISSING}
