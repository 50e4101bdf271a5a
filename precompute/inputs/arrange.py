"""Order the samples of a part, and cut them into shards of one size each.

Rows are ordered by bucket, and shards end where buckets do. Samples of another cache's plan keep their order, so that
both caches have the same rows. An image without a bucket is planned into that of the image before it, and rejected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.errors import ConfigError
from cache_store.format.array import Size, SizeRule
from cache_store.format.tables import WITHDRAWN
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.threads import map_concurrently
from precompute.images.buckets import placed_size
from precompute.images.rejected import Rejected
from precompute.inputs.reader import Reader

ASPECT_ROWS = 2**16
"""Rows in which samples are ordered by aspect; it bounds how far apart the reads of a disk lie."""

BLOCK_ROWS = 2**14
"""Files whose sizes are read together, many at the same time."""

Order = Literal["plan", "source", "aspect"]
"""The order of rows: that of another cache's plan; by bucket, else as the source has them; or by bucket and aspect."""

NO_BUCKET = -1

UNKNOWN = (0, 0, 0)

Shard = tuple[pa.Table, Size]
"""The rows of a shard, and the size of their samples."""

Arrange = Callable[[pa.Table], list[Shard]]
"""Orders the samples of a part, and cuts them into shards."""


def in_order(size: Size, samples_per_shard: int, part: pa.Table) -> list[Shard]:
    return [(shard, size) for shard in slices_of(part, samples_per_shard)]


def slices_of(table: pa.Table, size: int) -> Iterator[pa.Table]:
    return (table.slice(first, size) for first in range(0, table.num_rows, size))


@dataclass(frozen=True)
class BySize:
    """Orders samples by bucket, as a rule places them."""

    rule: SizeRule
    samples_per_shard: int
    reader: Reader
    check: Callable[[Size], object]
    """Raises ConfigError for a size that the encoder cannot take."""
    order: Order
    usual: Size
    """Where images go if none of their part has a bucket."""

    def __call__(self, part: pa.Table) -> list[Shard]:
        size_N3 = self.sizes_of(part)
        buckets, bucket_N = self._buckets(size_N3)
        for bucket in buckets:
            try:
                self.check(bucket)
            except ConfigError as error:
                raise ConfigError(f"image.buckets gives {bucket.width}x{bucket.height}: {error}") from None
        is_placed_N = bucket_N != NO_BUCKET
        if not buckets:
            buckets, bucket_N = [self.usual], np.zeros_like(bucket_N)
        like_N = last_placed(is_placed_N)
        order = self._order(bucket_N[like_N], size_N3[like_N, 2] / np.maximum(size_N3[like_N, 1], 1), like_N)
        rows, array_N = part.take(order), bucket_N[like_N][order]
        shards, borders = list[Shard](), np.flatnonzero(np.diff(array_N)) + 1
        for first, stop in zip([0, *borders], [*borders, len(array_N)], strict=True):
            run = slices_of(rows.slice(first, stop - first), self.samples_per_shard)
            shards += [(shard, buckets[array_N[first]]) for shard in run]
        return shards

    def sizes_of(self, part: pa.Table) -> NDArray[np.int32]:
        """Read frames, height and width of the files, 0 where one cannot be read: [rows, 3]."""
        sizes = list[tuple[int, ...]]()
        with ProgressBar("image sizes", part.num_rows, "image") as bar:
            for block in slices_of(part.select([*self.reader.columns, "state"]), BLOCK_ROWS):
                sizes += map_concurrently(self._size, block.to_pylist())
                bar.update(block.num_rows)
        return np.array(sizes, np.int32).reshape(-1, len(UNKNOWN))

    def _size(self, row: dict[str, object]) -> tuple[int, ...]:
        return UNKNOWN if row["state"] == WITHDRAWN else self.reader.size(row) or UNKNOWN

    def _order(
        self, array_N: NDArray[np.int64], aspect_N: NDArray[np.float64], like_N: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the order of a part's rows: by array, then blocks as the source has them, then aspect.

        So a cache of another resolution over the same plan gets few short shards. An image without a bucket follows the
        one whose bucket it has, so that a cache over the plan gives it the same one.
        """
        place_N = np.arange(len(array_N))
        if self.order == "plan":
            return place_N
        behind_N = 2 * like_N + (like_N != place_N)
        if self.order == "source":
            return np.lexsort((behind_N, array_N))
        return np.lexsort((behind_N, aspect_N, like_N // ASPECT_ROWS, array_N))

    def _buckets(self, size_N3: NDArray[np.int32]) -> tuple[list[Size], NDArray[np.int64]]:
        sizes, size_N = np.unique(size_N3, axis=0, return_inverse=True)
        found = [self._bucket(Size(*size)) for size in sizes.tolist()]
        buckets = sorted({each for each in found if each is not None})
        places = {bucket: index for index, bucket in enumerate(buckets)}
        indices = [NO_BUCKET if each is None else places[each] for each in found]
        return buckets, np.array(indices, np.int64)[size_N.reshape(-1)]

    def _bucket(self, size: Size) -> Size | None:
        try:
            return placed_size(self.rule, size) if all(size) else None
        except Rejected:
            return None


def last_placed(is_placed_N: NDArray[np.bool_]) -> NDArray[np.int64]:
    last_N = np.maximum.accumulate(np.where(is_placed_N, np.arange(len(is_placed_N)), -1))
    return np.where(last_N < 0, is_placed_N.argmax(), last_N)
