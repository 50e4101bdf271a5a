"""Sort samples of many sizes into buckets: the rows of a part are ordered by bucket, and shards end where buckets do.

Samples of another cache's plan keep their order, so that both caches have the same rows: shards end wherever the bucket
changes. Images that cannot be read, and those that the rule leaves out, are planned into the bucket of the image before
them, and rejected there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_store.errors import ConfigError, SourceError
from cache_store.format.array import Size, SizeRule
from cache_store.format.schema import SizedArray
from precompute.images.buckets import placed_size
from precompute.images.rejected import Rejected
from precompute.rerun.file_sizes import FileSizes
from precompute.rerun.match_rows import ROWS_HELD, reorder
from precompute.rerun.rows import Cut, ListedRows, Rows, cut_like, cut_rows, even_cut, rows_in_scratch

ASPECT_ROWS = 2**16
"""Rows in which samples are ordered by aspect; it bounds how far apart the reads of a disk lie."""

Order = Literal["plan", "source", "aspect"]
"""The order of rows: that of another cache's plan; by bucket, else as the source has them; or by bucket and aspect."""

NO_BUCKET = -1
"""Stands for the bucket of an image that has none."""


class Arranger(Protocol):
    """Orders rows, and cuts them into shards of one size each."""

    def arrange_new(self, found: ListedRows) -> Rows:
        """Arrange the samples of a new cache."""

    def arrange_added(self, planned: Rows, found: ListedRows) -> Rows | None:
        """Arrange the samples that follow those of a plan; None unless they do. Their sizes may be new."""


@dataclass(frozen=True)
class OneSize:
    """Leaves rows, all of one size, as they were listed."""

    array: SizedArray
    samples_per_shard: int
    rows_per_part: int

    def arrange_new(self, found: ListedRows) -> Rows:
        return cut_rows(found, self._cut(found, 0))

    def arrange_added(self, planned: Rows, found: ListedRows) -> Rows | None:
        return cut_like(found, planned, self._cut(found, len(planned)))

    def _cut(self, found: ListedRows, first: int) -> Cut:
        return even_cut(found.part_lengths(first, self.rows_per_part), self.samples_per_shard, (self.array,))


class BySize:
    """Orders the rows of a part by bucket, as a rule places them."""

    def __init__(
        self,
        rule: SizeRule,
        samples_per_shard: int,
        rows_per_part: int,
        sizes: FileSizes,
        array_of: Callable[[Size], SizedArray],
        order: Order,
    ) -> None:
        self._rule, self._shard_rows, self._part_rows = rule, samples_per_shard, rows_per_part
        self._sizes, self._array_of, self._order_of = sizes, array_of, order

    def arrange_new(self, found: ListedRows) -> Rows:
        order, cut = self._arranged(found, 0, ())
        return cut_rows(self._reordered(found, order), cut)

    def arrange_added(self, planned: Rows, found: ListedRows) -> Rows | None:
        order, cut = self._arranged(found, len(planned), planned.cut.arrays)
        return cut_like(self._reordered(found, order), planned, cut)

    def _reordered(self, found: ListedRows, order: NDArray[np.int64]) -> ListedRows:
        return rows_in_scratch(reorder(found, order, self._shard_rows, ROWS_HELD), found.parts)

    def _arranged(self, found: ListedRows, first: int, before: tuple[SizedArray, ...]) -> tuple[NDArray[np.int64], Cut]:
        """Return the order of all rows, of which those from `first` on change places, and how these are cut."""
        size_N3 = self._sizes.of(found, first)
        buckets, bucket_N = self._buckets(size_N3)
        known = [each.size for each in before]
        new = sorted({*buckets} - {*known})
        arrays = (*before, *map(self._array, new))
        if not arrays:
            unread = int((size_N3 == 0).any(1).sum())
            raise SourceError(
                f"image.buckets: none of {len(size_N3):,} images has a bucket: {unread:,} cannot be read, and "
                f"{self._rule.preset} leaves out {len(size_N3) - unread:,} for their size; check source.path, and "
                "image.buckets.step and no_upscale"
            )
        indices = {bucket: index for index, bucket in enumerate([*known, *new])}
        array_of_bucket = np.array([*(indices[each] for each in buckets), 0], np.int64)
        like_N = last_placed(bucket_N != NO_BUCKET)
        array_N = array_of_bucket[bucket_N[like_N]]
        aspect_N = size_N3[like_N, 2] / np.maximum(size_N3[like_N, 1], 1)
        places = np.arange(len(array_N))
        orders, cuts, start = [np.arange(first)], list[Cut](), 0
        for rows in found.part_lengths(first, self._part_rows):
            part = slice(start, start + rows)
            order = start + self._order(array_N[part], aspect_N[part], like_N[part], places[part])
            orders.append(first + order)
            cuts.append(self._cut(array_N[order], arrays))
            start += rows
        return np.concatenate(orders), reduce(Cut.with_more, cuts)

    def _order(
        self,
        array_N: NDArray[np.int64],
        aspect_N: NDArray[np.float64],
        like_N: NDArray[np.int64],
        place_N: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the order of a part's rows: by array, then blocks as the source has them, then aspect.

        A cache of another resolution over the same plan then changes its bucket rarely, and gets few short shards. An
        image without a bucket follows the one whose bucket it has, so that a cache over the plan gives it the same one.
        """
        if self._order_of == "plan":
            return np.arange(len(array_N))
        behind_N = 2 * like_N + (like_N != place_N)
        if self._order_of == "source":
            return np.lexsort((behind_N, array_N))
        return np.lexsort((behind_N, aspect_N, like_N // ASPECT_ROWS, array_N))

    def _cut(self, array_N: NDArray[np.int64], arrays: tuple[SizedArray, ...]) -> Cut:
        """Cut the rows of a part, each of the array with this index, into shards of one array each."""
        borders = np.flatnonzero(np.diff(array_N)) + 1
        cuts = [even_cut([len(run)], self._shard_rows).lengths for run in np.split(array_N, borders)]
        indices = np.repeat(array_N[[0, *borders]], [len(each) for each in cuts])
        return Cut(lengths=np.concatenate(cuts), indices=indices, parts=(len(indices),), arrays=arrays)

    def _buckets(self, size_N3: NDArray[np.int32]) -> tuple[list[Size], NDArray[np.int64]]:
        """Return the buckets of files of these sizes, and the index of each one's bucket, NO_BUCKET without one."""
        sizes, size_N = np.unique(size_N3, axis=0, return_inverse=True)
        found = [self._bucket(Size(*size)) for size in sizes.tolist()]
        buckets = sorted({each for each in found if each is not None})
        places = {bucket: index for index, bucket in enumerate(buckets)}
        indices = [NO_BUCKET if each is None else places[each] for each in found]
        return buckets, np.array(indices, np.int64)[size_N.reshape(-1)]

    def _bucket(self, size: Size) -> Size | None:
        try:
            return placed_size(self._rule, size) if all(size) else None
        except Rejected:
            return None

    def _array(self, bucket: Size) -> SizedArray:
        try:
            return self._array_of(bucket)
        except ConfigError as error:
            raise ConfigError(f"image.buckets gives {bucket.width}x{bucket.height}: {error}") from None


def last_placed(is_placed_N: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each place, the last one up to it that has a bucket, or else the first one that has one."""
    last_N = np.maximum.accumulate(np.where(is_placed_N, np.arange(len(is_placed_N)), -1))
    return np.where(last_N < 0, is_placed_N.argmax(), last_N)
