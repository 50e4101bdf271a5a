"""Read the sizes of a source's images, mostly from their first bytes; what was read is kept until the plan is written.

A stopped planning goes on where it was: each block of sizes is a file in the cache's folder, named for the digest of
the images that it is about.
"""

import hashlib
from collections.abc import Iterator, Sequence
from threading import Semaphore
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.layout import SIZES
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.daemon_threads import map_concurrently
from cache_store.storage.store import Store
from precompute.images.decode import size_from_head, size_of
from precompute.images.rejected import Rejected
from precompute.rerun.rows import Rows
from precompute.sources import Source
from precompute.sources.image_store import head_reader, read_planned
from precompute.sources.place import MISSING, planned_place

BLOCK_ROWS = 2**14
"""Images of a block: their sizes are read together and kept in one file, of 128 KiB."""


class ImageSizes:
    """Reads sizes of images that were just listed; keeps them in the store, if there is one.

    At most `threads` images are read whole, and perhaps decoded, at a time: each takes as much memory as in the build.
    """

    columns: tuple[str, ...] = ("uri", "fingerprint", "place")
    """Columns of the rows that sizes are read of."""
    unknown: tuple[int, ...] = (0, 0)
    """Stands for the size of an image that cannot be read."""

    def __init__(self, source: Source, store: Store | None, max_pixels: int, threads: int) -> None:
        self._source, self._store, self._max_pixels = source, store, max_pixels
        self._read_head, self._whole = head_reader(source), Semaphore(threads)
        self._rule: tuple[object, ...] = (max_pixels,)
        """What sizes depend on besides the images."""

    def of(self, rows: Rows, first: int = 0) -> NDArray[np.int32]:
        """Return width and height of the images of rows [first, …), 0 where an image cannot be read: [rows, 2]."""
        parts = [np.empty((0, len(self.unknown)), np.int32)]
        with ProgressBar("image sizes", len(rows) - first, "image") as bar:
            for block in blocks_of(rows, first, self.columns):
                parts.append(self._of_block(block))
                bar.update(block.num_rows)
        return np.concatenate(parts)

    def _of_block(self, block: pa.Table) -> NDArray[np.int32]:
        store, name, numbers = self._store, f"{SIZES}/{images_digest(block, self._rule)}", len(self.unknown)
        if store and store.has(name):
            sizes = np.frombuffer(store.read(name), "<i4")
            if sizes.size == numbers * block.num_rows:
                return sizes.reshape(-1, numbers)
        found = np.array(map_concurrently(self._of_image, block.to_pylist()), "<i4").reshape(-1, numbers)
        if store:
            store.put_whole(name, found.tobytes())
        return found

    def _of_image(self, row: dict[str, Any]) -> tuple[int, ...]:
        if row["fingerprint"] in (MISSING, None):  # None of a withdrawn sample
            return self.unknown
        try:
            if size := size_from_head(self._read_head(row["uri"], planned_place(row["place"]))):
                return size
            with self._whole:
                return size_of(read_planned(self._source, row), self._max_pixels) or self.unknown
        except Rejected:
            return self.unknown


def blocks_of(rows: Rows, first: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    for start in range(first, len(rows), BLOCK_ROWS):
        yield rows.plan.rows(start, min(start + BLOCK_ROWS, len(rows)), columns)


def images_digest(block: pa.Table, rule: tuple[object, ...]) -> str:
    """Hash what decides the sizes of a block: each image's columns but for its place, and the rule."""
    columns = [block[name].to_pylist() for name in block.column_names if name != "place"]
    return hashlib.sha256(repr((*rule, [*zip(*columns, strict=True)])).encode()).hexdigest()


def forget_sizes(store: Store) -> None:
    """Delete what was read for a plan that is written."""
    for name in store.list(SIZES):
        store.delete(f"{SIZES}/{name}")
    store.delete(f"{SIZES}/")
