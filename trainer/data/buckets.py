"""Buckets: a cache of several image sizes is shown in batches of one size each.

"One size a batch, batches of a fixed length, each sample once an epoch, none dropped" cannot all hold, so `remainder`
says which gives way, for a bucket of n samples in batches of B:

- `carry`: each bucket has an endless sequence of epochs of its own, and what does not fill a batch is carried into the
  next epoch. Epoch e has floor((e + 1) n / B) - floor(e n / B) of its batches, which may be none. Each sample is shown
  once in each epoch of its bucket; a batch that spans two of them, or more, may hold a sample twice.
- `short`: each epoch has ceil(n / B) of its batches, and the last of them is short.
- `repeat`: likewise, but the last batch is filled with samples of that epoch again.

An epoch's batches come in a keyed random order. Everything is computed from the batch's number: its epoch, its place in
the epoch's order, from this its bucket and its own number there, and from this the positions in the bucket's sequence.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from cache_store import JoinedCache
from cache_store.errors import ConfigError
from trainer.config import MAX_SHUFFLE_BLOCK
from trainer.data.order import Int64Array, SampleOrder, batch_positions, epoch_key, lanes_of, permute
from trainer.data.views import Views

Remainder = Literal["carry", "short", "repeat"]

# Axes: N samples, R runs of neighbouring samples of one size, B buckets.


@dataclass(frozen=True)
class Runs:
    """Sample numbers, bucket after bucket; of a whole cache, as runs of neighbours in place of an array."""

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
    """Name of each size, such as `1344x768`, in the order of their first rows."""
    starts_R: Int64Array
    """First sample number of each run, ascending."""
    sizes_R: Int64Array
    """Index of each run's size."""

    def of(self, numbers: np.ndarray) -> Int64Array:
        """Return the index of each sample's size: [N]."""
        sizes_N: Int64Array = self.sizes_R[np.searchsorted(self.starts_R, numbers, side="right") - 1]
        return sizes_N


def sizes_of(cache: JoinedCache) -> Sizes:
    """Return the sizes of a cache's samples; of joined caches, the combinations that occur."""
    views = cache.views if isinstance(cache, Views) else (cache,)
    specs = [[each.spec for each in view.caches.values()] for view in views]
    rows_R = np.unique(np.concatenate([spec.bounds[:-1] for view in specs for spec in view]))
    named = [[np.array([each.name for each in spec.arrays] or [""]) for spec in view] for view in specs]
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
                f"{cache.first.store}; build both with the same image.buckets"
            )
    found, row, size_R = np.unique(first, axis=0, return_index=True, return_inverse=True)
    by_row = np.argsort(row)
    sizes_R = np.argsort(by_row)[size_R.reshape(-1)]
    begins = np.flatnonzero(np.diff(sizes_R, prepend=-1))
    rows_R, sizes_R = rows_R[begins], sizes_R[begins]
    return Sizes(
        names=tuple(" and ".join(dict.fromkeys(filter(None, found[size].tolist()))) for size in by_row),
        starts_R=rows_R - np.searchsorted(cache.rejected_rows(), rows_R),
        sizes_R=sizes_R,
    )


def parts_alike(sizes_N: Int64Array, most: int) -> list[slice]:
    """Cut samples, by the index of each one's size, into neighbours of one size, at most `most` in a part."""
    bounds = [0, *(np.flatnonzero(np.diff(sizes_N)) + 1).tolist(), len(sizes_N)]
    return [
        slice(start, min(start + most, end)) for first, end in pairwise(bounds) for start in range(first, end, most)
    ]


def group_by_size(
    sizes: Sizes, total: int, samples: Int64Array | None, weights_N: Int64Array | None = None
) -> tuple[Int64Array, Numbers]:
    """Return how many samples of each size an epoch shows, and their numbers, size after size.

    `samples` lists them; None: all of the cache's `total`. Each counts as often as its weight in `weights_N`, of
    `samples`, says. The counts are [sizes].
    """
    if samples is None and weights_N is None:
        lengths_R = np.diff(sizes.starts_R, append=total)
        order = np.argsort(sizes.sizes_R, kind="stable")
        counts_B = np.zeros(len(sizes.names), np.int64)
        np.add.at(counts_B, sizes.sizes_R, lengths_R)
        return counts_B, Runs(sizes.starts_R[order], lengths_R[order])
    chosen = np.arange(total) if samples is None else samples
    sizes_N = sizes.of(chosen)
    order, counts_B = np.argsort(sizes_N, kind="stable"), np.bincount(sizes_N, weights_N, len(sizes.names))
    if weights_N is None:
        return counts_B, chosen[order]
    return counts_B.astype(np.int64), Repeats(chosen[order], np.cumsum(weights_N[order]))


@dataclass(frozen=True)
class BucketOrder:
    """The order of samples in buckets: which one is at each position, where batch k has positions [k·B, (k + 1)·B).

    A short batch has fewer positions, and the rest of its range has no sample. Indices count bucket after bucket.
    """

    identity: str
    seed: int
    counts: tuple[int, ...]
    """Number of samples of each bucket; it may be 0."""
    batch_size: int
    remainder: Remainder = "carry"
    block: int = 1
    """Single samples are shuffled."""

    @cached_property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def epoch_positions(self) -> int:
        """Number of positions of an epoch; to carry, on average."""
        return self.count if self.remainder == "carry" else int(self._filled.sum()) * self.batch_size

    @property
    def positions_alike(self) -> int:
        """Number of positions, from 0 on, whose samples have one size."""
        return len(self.batch(0, self.batch_size))

    def batch(self, number: int, batch_size: int) -> Int64Array:
        """Return the positions of a global batch."""
        positions = batch_positions(number, batch_size)
        return positions[: len(self._own(number)[1])] if self.remainder == "short" else positions

    def at(self, positions: Int64Array) -> Int64Array:
        """Return the indices in [0, count) at `positions`."""
        indices = np.empty_like(positions)
        for here, bucket, own in self._by_batch(positions):
            indices[here] = sum(self.counts[:bucket]) + self._order(bucket).at(own)
        return indices

    def views_at(self, positions: Int64Array, views: int) -> Int64Array:
        """Return the view, in [0, views), that the sample at each position shows; see `SampleOrder.views_at`."""
        shown = np.empty_like(positions)
        for here, bucket, own in self._by_batch(positions):
            shown[here] = self._order(bucket).views_at(own, views)
        return shown

    def refuse_ranks(self, world_size: int, names: tuple[str, ...]) -> None:
        """Raise ConfigError if a short batch would leave a rank without a sample."""
        for name, count in zip(names, self.counts, strict=True):
            if self.remainder == "short" and count and (last := (count - 1) % self.batch_size + 1) < world_size:
                raise ConfigError(
                    f"remainder: short: bucket {name or 'of all'} has {count:,} samples, so its last batch of {last} "
                    f"has none for some of {world_size} ranks: take `carry` or `repeat`, fewer ranks or another "
                    "batch_size, or leave the bucket out of `samples`"
                )

    @cached_property
    def _counts(self) -> Int64Array:
        return np.array(self.counts, np.int64)

    @cached_property
    def _filled(self) -> Int64Array:
        """Number of batches that hold all of each bucket, the last perhaps in part."""
        return -(-self._counts // self.batch_size)

    def _order(self, bucket: int) -> SampleOrder:
        return SampleOrder(f"{self.identity}\n{bucket}", self.seed, self.counts[bucket])

    def _before(self, epoch: int) -> Int64Array:
        """Return the number of each bucket's batches in the epochs before `epoch`."""
        return epoch * self._counts // self.batch_size if self.remainder == "carry" else epoch * self._filled

    def _epoch(self, number: int) -> int:
        """Return the epoch of a global batch, by bisection between two bounds of the number of batches before it."""
        low = number // int(self._filled.sum())
        high = (number + len(self.counts)) * self.batch_size // self.count + 1
        before = bisect_right(range(low, high), number, key=lambda epoch: int(self._before(epoch).sum()))
        return low + before - 1

    def _own(self, number: int) -> tuple[int, Int64Array]:
        """Return the bucket of a global batch, and its positions in the bucket's own sequence of epochs."""
        epoch = self._epoch(number)
        before_B, after_B = self._before(epoch), self._before(epoch + 1)
        ends_B = np.cumsum(after_B - before_B)
        key = epoch_key(f"{self.identity}\nbatches", self.seed, epoch)
        place = int(permute(np.array([number - before_B.sum()]), int(ends_B[-1]), key)[0])
        bucket = int(np.searchsorted(ends_B, place, side="right"))
        own = int(after_B[bucket] - ends_B[bucket]) + place
        if self.remainder == "carry":
            return bucket, batch_positions(own, self.batch_size)
        count = self.counts[bucket]
        own_epoch, part = divmod(own, int(self._filled[bucket]))
        within = batch_positions(part, self.batch_size)
        return bucket, own_epoch * count + (within[within < count] if self.remainder == "short" else within % count)

    def _by_batch(self, positions: Int64Array) -> Iterator[tuple[np.ndarray, int, Int64Array]]:
        """Yield for each batch which of `positions` it has, its bucket, and their positions in the bucket's order."""
        numbers, places = np.divmod(positions, self.batch_size)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            bucket, own = self._own(number)
            yield here, bucket, own[places[here]]


def make_order(
    identity: str, seed: int, counts: Int64Array, batch_size: int, shuffle_block: int, remainder: Remainder
) -> SampleOrder | BucketOrder:
    """Make the order of samples, `counts` of each size: of single ones, or of blocks if `shuffle_block` is above 1."""
    if not (isinstance(shuffle_block, int) and 1 <= shuffle_block <= MAX_SHUFFLE_BLOCK):
        raise ConfigError(f"shuffle_block must be a whole number in [1, {MAX_SHUFFLE_BLOCK:,}], got {shuffle_block!r}")
    if remainder not in get_args(Remainder):
        raise ConfigError(f"remainder must be one of {', '.join(get_args(Remainder))}, got {remainder!r}")
    if remainder == "carry" and np.count_nonzero(counts) == 1:
        return SampleOrder(identity, seed, int(counts.sum()), block=shuffle_block, lanes=lanes_of(batch_size))
    if shuffle_block > 1:
        raise ConfigError(
            f"shuffle_block {shuffle_block}: samples of several sizes, or with another `remainder` than `carry`, are "
            "shuffled one by one; leave it at 1"
        )
    return BucketOrder(identity, seed, tuple(counts.tolist()), batch_size, remainder)
