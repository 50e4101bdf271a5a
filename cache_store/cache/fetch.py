"""Read samples of a cache in an object store: only their byte ranges, many at the same time."""

import errno
import shlex
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_store.cache.sealed_shards import SealedShards
from cache_store.cache.survey import size_problem
from cache_store.errors import CacheError
from cache_store.format.schema import FileRecord
from cache_store.storage.ahead import COALESCED_BYTES
from cache_store.storage.store import Store
from cache_store.storage.verbs import Ranges

RANGES_A_CALL = 10
"""Most ranges of one file in a call: obstore fetches ten at the same time, and any more only after those."""

CALL_BYTES = 4 << 20
"""Adjacent samples form one range of about this size at most: several connections together are faster than one."""

CALLS_AT_ONCE = 32
"""Calls in flight: each waits about 20 ms for its first byte on its own connection, and a process can have hundreds."""


def fetch_samples(store: Store, shards: SealedShards, numbers: NDArray[np.int64]) -> Iterator[tuple[int, memoryview]]:
    """Fetch samples by number: yield each sample's position in `numbers` and its encoded bytes.

    Raises CacheError if a file is missing, or too short for a sample and not of its sealed size.
    """
    by_shard = shards.shards_of(numbers)
    shards.locate(np.unique(by_shard).tolist())
    places, fixed = shards.places, shards.spec.array.sample_bytes
    offsets = places["offset"][numbers]
    lengths = places["length"][numbers] if "length" in places else np.full(len(numbers), fixed)
    order = np.lexsort((offsets, by_shard))
    parts = [*split_into_calls(order, *(each[order].tolist() for each in (by_shard, offsets, lengths)))]
    for first in range(0, len(parts), CALLS_AT_ONCE):
        at_once = parts[first : first + CALLS_AT_ONCE]
        files = [shards.located[int(by_shard[part[0]])] for part in at_once]
        wanted = [
            Ranges(file.path, offsets[part].tolist(), lengths[part].tolist(), file.bytes, file.sha256)
            for part, file in zip(at_once, files, strict=True)
        ]
        for part, found in zip(at_once, fetch_sealed(store, files, wanted), strict=True):
            yield from zip(part.tolist(), found, strict=True)


def fetch_sealed(store: Store, files: Sequence[FileRecord], wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
    """Fetch ranges of sealed files; CacheError if a file is missing or of a wrong size, OSError if answers are cut."""
    try:
        return store.fetch(wanted)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODATA):
            named = [file for file in files if store.where(file.path) == error.filename]
            if named and isinstance(problem := size_problem(store, named[0]), CacheError):
                raise CacheError(f"{problem}; run `cache-store verify {shlex.quote(str(store))}`") from None
        raise


def split_into_calls(
    order: NDArray[np.int64], shards: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[NDArray[np.int64]]:
    """Split samples, sorted by shard and offset, into parts of one shard and one call each."""
    first = ranges = 0
    for place in range(1, len(order)):
        is_near = offsets[place] - offsets[place - 1] - lengths[place - 1] <= COALESCED_BYTES
        ranges += not is_near
        if (
            shards[place] != shards[first]
            or ranges == RANGES_A_CALL
            or (offsets[place] + lengths[place] - offsets[first] > CALL_BYTES and is_near)
        ):
            yield order[first:place]
            first, ranges = place, 0
    if len(order):
        yield order[first:]
