"""Reading samples of a cache that lies in an object store: their ranges, and no more, many at a time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cache_store.cache.sealed_shards import SealedShards
from cache_store.storage.kept_blocks import Ranges
from cache_store.storage.store import FetchedStore

RANGES_A_CALL = 10
"""Of samples of one file: obstore fetches so many side by side, and more of them one after the other."""

RANGES_AT_ONCE = 256
"""In flight: each waits some 20 ms for its first byte, on a connection of its own, of which a process has hundreds."""


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
    for first in range(0, len(order), RANGES_AT_ONCE):
        at_once = order[first : first + RANGES_AT_ONCE]
        parts = [*cut(at_once, by_shard[at_once])]
        files = [shards.located[int(by_shard[part[0]])] for part in parts]
        wanted = [
            Ranges(file.path, offsets[part].tolist(), lengths[part].tolist(), file.bytes, file.sha256)
            for part, file in zip(parts, files, strict=True)
        ]
        for part, found in zip(parts, store.fetch(wanted), strict=True):
            yield from zip(part.tolist(), found, strict=True)


def cut(order: NDArray[np.int64], shards: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Into parts of one shard, of a call each."""
    for part in np.split(order, np.flatnonzero(np.diff(shards)) + 1):
        for first in range(0, len(part), RANGES_A_CALL):
            yield part[first : first + RANGES_A_CALL]
