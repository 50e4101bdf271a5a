"""Reading samples of a cache that lies in an object store: their ranges, and no more, many at a time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cache_store.cache.sealed_shards import SealedShards
from cache_store.storage.kept_blocks import Ranges
from cache_store.storage.store import FetchedStore

RANGES_A_REQUEST = 64
"""Of samples of one file: the files of a batch, and parts of them, are then asked for side by side."""


def fetch_samples(
    store: FetchedStore, shards: SealedShards, numbers: NDArray[np.int64]
) -> Iterator[tuple[int, memoryview]]:
    """Positions in `numbers` and the encoded samples of these, as they lie in their files."""
    by_shard = shards.of(numbers)
    shards.locate(np.unique(by_shard).tolist(), store)
    places, fixed = shards.places, shards.spec.array.sample_bytes
    offsets = places["offset"][numbers]
    lengths = places["length"][numbers] if "length" in places else np.full(len(numbers), fixed)
    order = np.lexsort((offsets, by_shard))
    parts = [*cut(order, by_shard[order])]
    files = [shards.located[int(by_shard[part[0]])] for part in parts]
    wanted = [
        Ranges(file.path, offsets[part].tolist(), lengths[part].tolist(), file.bytes, file.sha256)
        for part, file in zip(parts, files, strict=True)
    ]
    for part, found in zip(parts, store.fetch(wanted), strict=True):
        yield from zip(part.tolist(), found, strict=True)


def cut(order: NDArray[np.int64], shards: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Into parts of one shard, of a request each."""
    for part in np.split(order, np.flatnonzero(np.diff(shards)) + 1) if order.size else []:
        for first in range(0, len(part), RANGES_A_REQUEST):
            yield part[first : first + RANGES_A_REQUEST]
