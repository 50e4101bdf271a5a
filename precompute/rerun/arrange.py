"""Sort images of many sizes into buckets: rows of one planning are ordered by bucket, and shards end where buckets do.

Images that cannot be read, and those that the rule leaves out, are planned into the largest bucket, and rejected there.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache_store.errors import ConfigError, SourceError
from cache_store.format.array import BucketRule
from cache_store.format.schema import SizedArray
from precompute.images.buckets import BucketSize, Size, place
from precompute.images.rejected import Rejected
from precompute.rerun.image_sizes import ImageSizes
from precompute.rerun.match_rows import reorder
from precompute.rerun.rows import Added, Rows, even_cut, number_rows, rows_in_scratch

ROWS_HELD = 2**18
"""Rows reordered at a time."""

SOMEWHERE = -1
"""Stands for the bucket of an image that has none."""


class Arranger:
    """Orders rows by bucket and cuts them into shards."""

    def __init__(
        self,
        rule: BucketRule,
        sizes: ImageSizes,
        shape_of: Callable[[BucketSize], tuple[int, ...]],
        samples_per_shard: int,
    ) -> None:
        self._rule, self._sizes, self._shape_of, self._shard_rows = rule, sizes, shape_of, samples_per_shard

    def first(self, found: Rows) -> Rows:
        """Arrange the samples of a new cache."""
        order, added = self._arranged(found, 0, ())
        bounds = np.concatenate([[0], np.cumsum(added.lengths)])
        return self._reordered(found, order).cut_at(bounds, added.arrays, added.indices)

    def grown(self, planned: Rows, found: Rows) -> Rows | None:
        """Arrange the samples that follow those of a plan; their buckets may be new."""
        order, added = self._arranged(found, len(planned), planned.arrays)
        return self._reordered(found, order).cut_like(planned, self._shard_rows, added)

    def _reordered(self, found: Rows, order: NDArray[np.int64]) -> Rows:
        return rows_in_scratch(number_rows(reorder(found.plan, order, self._shard_rows, ROWS_HELD)))

    def _arranged(self, found: Rows, first: int, before: tuple[SizedArray, ...]) -> tuple[NDArray[np.int64], Added]:
        """Return the order of all rows, of which those from `first` on change places, and how these are cut."""
        buckets, bucket_N = self._buckets(self._sizes.of(found, first))
        known = [BucketSize(each.frames, each.height, each.width) for each in before]
        new = sorted({*buckets} - {*known})
        arrays = (*before, *map(self._array, new))
        if not arrays:
            raise SourceError(f"the sizes of {len(found):,} images are needed, and none of them can be read")
        places = {bucket: index for index, bucket in enumerate([*known, *new])}
        array_of_bucket = np.array([*(places[each] for each in buckets), SOMEWHERE], np.int64)
        array_N = array_of_bucket[bucket_N]
        counts = np.bincount(array_N[array_N >= 0], minlength=len(arrays))
        array_N[array_N == SOMEWHERE] = int(counts.argmax())
        order = np.argsort(array_N, kind="stable")
        cuts = [even_cut(int(count), self._shard_rows) for count in np.bincount(array_N, minlength=len(arrays))]
        lengths = [each.lengths for each in cuts]
        indices = np.repeat(np.arange(len(arrays)), [len(each) for each in lengths])
        added = Added(lengths=np.concatenate(lengths), indices=indices, arrays=arrays)
        return np.concatenate([np.arange(first), first + order]), added

    def _buckets(self, size_N2: NDArray[np.int32]) -> tuple[list[BucketSize], NDArray[np.int64]]:
        """Return the buckets of images of these sizes, and the index of each one's bucket, SOMEWHERE without one."""
        sizes, size_N = np.unique(size_N2, axis=0, return_inverse=True)
        found = [self._bucket((int(width), int(height))) for width, height in sizes]
        buckets = sorted({each for each in found if each is not None})
        indices = [SOMEWHERE if each is None else buckets.index(each) for each in found]
        return buckets, np.array(indices, np.int64)[size_N.reshape(-1)]

    def _bucket(self, size: Size) -> BucketSize | None:
        try:
            return place(self._rule, size).bucket if all(size) else None
        except Rejected:
            return None

    def _array(self, bucket: BucketSize) -> SizedArray:
        frames, height, width = bucket
        try:
            return SizedArray(width=width, height=height, frames=frames, shape=self._shape_of(bucket))
        except ConfigError as error:
            raise ConfigError(f"image.buckets gives {width}x{height}: {error}") from None
