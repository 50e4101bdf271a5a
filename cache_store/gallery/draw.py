"""Choose rows to look at: seeded draws whose cost depends on the number of rows drawn, not on the cache's size."""

# Axes: N samples drawn.

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.reader import Cache
from cache_store.format.tables import REJECTED

SURVEY_SAMPLES = 16_384
SURVEY_SHARDS = 64
SURVEY_BYTES = 2**30
"""Limits of a survey: enough samples to know what is usual, in seconds to a minute."""


@dataclass(frozen=True, kw_only=True)
class SurveyDraw:
    """The samples that are searched for unusual ones."""

    number_N: np.ndarray
    """Sample numbers, ascending."""
    shards: int
    is_whole: bool
    """Whether these are all samples of the cache."""


def random_numbers(cache: Cache, rows: int, seed: int) -> np.ndarray:
    """Draw sample numbers uniformly over the whole cache, ascending."""
    return draw_numbers(len(cache), rows, generator(seed, "random"))


def choose_samples(cache: Cache, sample_bytes: int, seed: int) -> SurveyDraw:
    """Choose all samples of a small cache; of a large one, samples of random shards."""
    limit = min(SURVEY_SAMPLES, max(1, SURVEY_BYTES // sample_bytes))
    counts = np.asarray(cache.seal.cached_per_shard)
    occupied = np.flatnonzero(counts)
    if len(cache) <= limit and len(occupied) <= SURVEY_SHARDS:
        return SurveyDraw(number_N=np.arange(len(cache)), shards=len(occupied), is_whole=True)
    random = generator(seed, "survey")
    shards = occupied[draw_numbers(len(occupied), min(SURVEY_SHARDS, limit), random)]
    starts, share = np.cumsum(counts) - counts, -(-limit // len(shards))
    numbers = [starts[shard] + draw_numbers(int(counts[shard]), share, random) for shard in shards]
    return SurveyDraw(number_N=np.concatenate(numbers), shards=len(shards), is_whole=False)


def draw_rejects(cache: Cache, rows: int, seed: int) -> list[dict[str, object]]:
    """Draw rejected rows of the samples tables, in row order: all of them if they are few.

    Only samples tables of shards with drawn rejects are read, `rows` at most.
    """
    planned = np.array([len(cache.spec.shard_rows(shard)) for shard in range(cache.spec.num_shards)])
    rejected = planned - np.asarray(cache.seal.cached_per_shard)
    ends = np.cumsum(rejected)
    places = draw_numbers(int(ends[-1]), rows, generator(seed, "rejects"))
    shards = np.searchsorted(ends, places, side="right")
    found: list[dict[str, object]] = []
    for shard in np.unique(shards):
        within = places[shards == shard] - (ends[shard] - rejected[shard])
        found.extend(read_rejects(cache, int(shard)).take(within).to_pylist())
    return found


def read_rejects(cache: Cache, shard: int) -> pa.Table:
    table = cache.shards.table(shard)
    return table.filter(pc.equal(table["status"], REJECTED))


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Make one random stream per purpose, so that more rows of one kind do not change the others."""
    return np.random.default_rng([seed, *purpose.encode()])


def draw_numbers(count: int, wanted: int, random: np.random.Generator) -> np.ndarray:
    """Draw `wanted` distinct numbers of [0, count), or all, ascending; memory grows with `wanted` only."""
    if wanted >= count:
        return np.arange(count)
    return np.sort(random.choice(count, wanted, replace=False, shuffle=False))


def batches(number_N: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(number_N), size):
        yield number_N[start : start + size]
