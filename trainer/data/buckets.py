"""Buckets: the samples of each size are shown in batches of their own.

"One size a batch, batches of a fixed length, each sample once an epoch, none dropped" cannot all hold, so `remainder`
says which gives way, for a bucket of n samples in batches of B:

- `carry`: each bucket has an endless sequence of epochs of its own, and what does not fill a batch is carried into the
  next epoch: each sample is shown once in each epoch of its bucket; a batch that spans two of them, or more, may hold a
  sample twice.
- `short`: each epoch has ceil(n / B) of its batches, and the last of them is short.
- `repeat`: likewise, but the last batch is filled with samples of that epoch again.

`Shares` deals the batches out to the buckets: a batch's number says its bucket and its own number there.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from cache_store import JoinedCache
from cache_store.errors import ConfigError
from trainer.config import MAX_SHUFFLE_BLOCK
from trainer.data.order import Int64Array, Permutation, Shares, lanes_of
from trainer.data.views import Views

Remainder = Literal["carry", "short", "repeat"]

# Axes: N samples, R runs of neighbouring samples of one size, B buckets.


@dataclass(frozen=True)
class Runs:
    """Sample numbers of a whole cache, grouped by bucket: runs of consecutive numbers in place of an array."""

    starts_R: Int64Array
    lengths_R: Int64Array

    @cached_property
    def _ends(self) -> Int64Array:
        return np.cumsum(self.lengths_R)

    def __getitem__(self, indices: Int64Array) -> Int64Array:
        run = np.searchsorted(self._ends, indices, side="right")
        numbers: Int64Array = self.starts_R[run] + self.lengths_R[run] - self._ends[run] + indices
        return numbers


@dataclass(frozen=True)
class Repeats:
    """Sample numbers, each as many times as its weight."""

    numbers_N: Int64Array
    ends_N: Int64Array
    """Sum of the weights of all samples up to this one."""

    def __getitem__(self, indices: Int64Array) -> Int64Array:
        return self.numbers_N[np.searchsorted(self.ends_N, indices, side="right")]


Numbers = Int64Array | Runs | Repeats
"""Sample numbers by index."""


@dataclass(frozen=True)
class Sizes:
    """The image sizes of a cache's samples."""

    names: tuple[str, ...]
    """Such as `1344x768`, in the order of their first rows."""
    starts_R: Int64Array
    """First sample number of each run, ascending."""
    sizes_R: Int64Array
    """Index of each run's size."""

    def indices(self, numbers: np.ndarray) -> Int64Array:
        sizes_N: Int64Array = self.sizes_R[np.searchsorted(self.starts_R, numbers, side="right") - 1]
        return sizes_N


def sizes_of(cache: JoinedCache) -> Sizes:
    """Return the sizes of a cache's samples; for joined caches, the combinations that occur."""
    views = cache.views if isinstance(cache, Views) else (cache,)
    specs = [[each.spec for each in view.caches.values()] for view in views]
    rows_R = np.unique(np.concatenate([spec.bounds[:-1] for view in specs for spec in view]))
    named = [[np.array(spec.names) for spec in view] for view in specs]
    shards = [[np.searchsorted(spec.bounds, rows_R, side="right") - 1 for spec in view] for view in specs]
    first, *others = (
        np.stack([name[spec.array_indices[shard]] for spec, name, shard in zip(*view, strict=True)], axis=1)
        for view in zip(specs, named, shards, strict=True)
    )
    for view, other in zip(views[1:], others, strict=True):
        if (faulty := np.flatnonzero((other != first).any(1))).size:
            row, sizes = faulty[0], [" and ".join(each[faulty[0]]) for each in (other, first)]
            raise ConfigError(
                f"views: the image of row {rows_R[row]} is {sizes[0]} in {view.first.store}, but {sizes[1]} in "
                f"{cache.first.store}; build both with the same sizes of images"
            )
    found, row, size_R = np.unique(first, axis=0, return_index=True, return_inverse=True)
    by_row = np.argsort(row)
    sizes_R = np.argsort(by_row)[size_R.reshape(-1)]
    begins = np.flatnonzero(np.diff(sizes_R, prepend=-1))
    rows_R, sizes_R = rows_R[begins], sizes_R[begins]
    return Sizes(
        names=tuple(" and ".join(dict.fromkeys(found[size].tolist())) for size in by_row),
        starts_R=rows_R - np.searchsorted(cache.rejected_rows(), rows_R),
        sizes_R=sizes_R,
    )


def parts_alike(sizes_N: Int64Array, most: int) -> list[slice]:
    """Cut samples, whose sizes are given by index, into neighbours of one size, at most `most` in a part."""
    bounds = [0, *(np.flatnonzero(np.diff(sizes_N)) + 1).tolist(), len(sizes_N)]
    return [
        slice(start, min(start + most, end)) for first, end in pairwise(bounds) for start in range(first, end, most)
    ]


def group_by_size(
    sizes: Sizes, total: int, samples: Int64Array | None, weights_N: Int64Array | None = None
) -> tuple[Int64Array, Numbers]:
    """Return how many samples of each size an epoch shows, [B], and their numbers, size after size.

    `samples` lists them; None: all of the cache's `total`. Each counts as often as its weight says.
    """
    if samples is None and weights_N is None:
        lengths_R = np.diff(sizes.starts_R, append=total)
        order = np.argsort(sizes.sizes_R, kind="stable")
        counts_B = np.zeros(len(sizes.names), np.int64)
        np.add.at(counts_B, sizes.sizes_R, lengths_R)
        return counts_B, Runs(sizes.starts_R[order], lengths_R[order])
    chosen = np.arange(total) if samples is None else samples
    sizes_N = sizes.indices(chosen)
    order, counts_B = np.argsort(sizes_N, kind="stable"), np.bincount(sizes_N, weights_N, len(sizes.names))
    if weights_N is None:
        return counts_B, chosen[order]
    return counts_B.astype(np.int64), Repeats(chosen[order], np.cumsum(weights_N[order]))


class Places(NamedTuple):
    """Where samples are in the sequences of their buckets."""

    bucket_N: Int64Array
    own_N: Int64Array
    """Positions in the bucket's own endless sequence of epochs."""


@dataclass(frozen=True)
class SampleOrder:
    """Which sample is at each position, where batch k has positions [k·B, (k + 1)·B), a short one fewer.

    Indices count bucket after bucket.
    """

    identity: str
    seed: int
    counts: tuple[int, ...]
    """Samples of each bucket; may be 0."""
    batch_size: int
    remainder: Remainder = "carry"
    block: int = 1
    """Number of neighbours that are shuffled together; 1: single samples."""

    @cached_property
    def epoch_positions(self) -> int:
        """Positions of an epoch; to carry, on average."""
        return sum(self.counts) if self.remainder == "carry" else int(self._filled.sum()) * self.batch_size

    def batch(self, number: int) -> Int64Array:
        bucket, own = self._shares.place(number)
        left = self.counts[bucket] - own % int(self._filled[bucket]) * self.batch_size
        size = min(left, self.batch_size) if self.remainder == "short" else self.batch_size
        return number * self.batch_size + np.arange(size)

    def places(self, positions: Int64Array) -> Places:
        numbers, within = np.divmod(positions, self.batch_size)
        found, batch_N = np.unique(numbers, return_inverse=True)
        placed = np.array([self._shares.place(number) for number in found.tolist()], np.int64).reshape(-1, 2)
        bucket_N, own_N = placed[batch_N].T
        if self.remainder == "carry":
            return Places(bucket_N, own_N * self.batch_size + within)
        epoch_N, part_N = np.divmod(own_N, self._filled[bucket_N])
        counts_N = np.array(self.counts, np.int64)[bucket_N]
        return Places(bucket_N, epoch_N * counts_N + (part_N * self.batch_size + within) % counts_N)

    def at(self, positions: Int64Array) -> Int64Array:
        return self.indices(self.places(positions))

    def indices(self, places: Places) -> Int64Array:
        indices = np.empty_like(places.own_N)
        for bucket in np.unique(places.bucket_N).tolist():
            here = places.bucket_N == bucket
            indices[here] = sum(self.counts[:bucket]) + self.permutation(bucket).at(places.own_N[here])
        return indices

    def views(self, places: Places, views: int) -> Int64Array:
        shown = np.empty_like(places.own_N)
        for bucket in np.unique(places.bucket_N).tolist():
            here = places.bucket_N == bucket
            shown[here] = self.permutation(bucket).views_at(places.own_N[here], views)
        return shown

    def permutation(self, bucket: int) -> Permutation:
        identity = f"{self.identity}\n{bucket}" if bucket else self.identity
        return Permutation(identity, self.seed, self.counts[bucket], self.block, lanes_of(self.batch_size))

    def end(self, bucket: int, position: int) -> int:
        """Return the end of a bucket's places that the batches before a position show, to carry."""
        return self._shares.before(position // self.batch_size)[bucket] * self.batch_size

    def refuse_ranks(self, world_size: int, names: tuple[str, ...]) -> None:
        for name, count in zip(names, self.counts, strict=True):
            if self.remainder == "short" and count and (last := (count - 1) % self.batch_size + 1) < world_size:
                raise ConfigError(
                    f"remainder: short: bucket {name} has {count:,} samples, so its last batch of {last} "
                    f"has none for some of {world_size} ranks: take `carry` or `repeat`, fewer ranks or another "
                    "batch_size, or leave the bucket out of `samples`"
                )

    @cached_property
    def _filled(self) -> Int64Array:
        return -(-np.array(self.counts, np.int64) // self.batch_size)

    @cached_property
    def _shares(self) -> Shares:
        weights = self.counts if self.remainder == "carry" else self._filled.tolist()
        return Shares(weights, (f"{self.identity}\n{self.seed}\n{bucket}" for bucket in range(len(self.counts))))


def make_order(
    identity: str, seed: int, counts: Int64Array, batch_size: int, shuffle_block: int, remainder: Remainder
) -> SampleOrder:
    if not (isinstance(shuffle_block, int) and 1 <= shuffle_block <= MAX_SHUFFLE_BLOCK):
        raise ConfigError(f"shuffle_block must be a whole number in [1, {MAX_SHUFFLE_BLOCK:,}], got {shuffle_block!r}")
    if remainder not in get_args(Remainder):
        raise ConfigError(f"remainder must be one of {', '.join(get_args(Remainder))}, got {remainder!r}")
    if shuffle_block > 1 and remainder != "carry":
        raise ConfigError(f"shuffle_block {shuffle_block} needs `remainder: carry`, got {remainder}; leave it at 1")
    return SampleOrder(identity, seed, tuple(counts.tolist()), batch_size, remainder, shuffle_block)
