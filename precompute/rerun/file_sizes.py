"""Read the sizes of a source's files, mostly from their first bytes; what was read is kept until the plan is written.

A stopped planning goes on where it was: each block of sizes is a file in the cache's folder, named for the digest of
the files that it is about.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.layout import SIZES
from cache_store.format.tables import WITHDRAWN
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.daemon_threads import map_concurrently
from cache_store.storage.store import Store
from precompute.inputs.reader import Reader
from precompute.rerun.rows import ListedRows

BLOCK_ROWS = 2**14
"""Files of a block: their sizes are read together and kept in one file, of 192 KiB."""

UNKNOWN = (0, 0, 0)
"""Stands for the size of a file that cannot be read."""


class FileSizes:
    """Reads sizes of files that were just listed; keeps them in the store, if there is one."""

    def __init__(self, reader: Reader, rule: str, store: Store | None) -> None:
        """`rule` changes with all that sizes depend on besides the files."""
        self._reader, self._rule, self._store = reader, rule, store

    def of(self, rows: ListedRows, first: int = 0) -> NDArray[np.int32]:
        """Return frames, height and width of the files of rows [first, …), 0 where one cannot be read: [rows, 3]."""
        parts = [np.empty((0, len(UNKNOWN)), np.int32)]
        with ProgressBar("image sizes", len(rows) - first, "image") as bar:
            for block in blocks_of(rows, first, self._reader.columns):
                parts.append(self._of_block(block))
                bar.update(block.num_rows)
        return np.concatenate(parts)

    def _of_block(self, block: pa.Table) -> NDArray[np.int32]:
        store, name, numbers = self._store, f"{SIZES}/{files_digest(block, self._rule)}", len(UNKNOWN)
        if store and store.has(name):
            sizes = np.frombuffer(store.read(name), "<i4")
            if sizes.size == numbers * block.num_rows:
                return sizes.reshape(-1, numbers)
        found = np.array(map_concurrently(self._size, block.to_pylist()), "<i4").reshape(-1, numbers)
        if store:
            store.put_whole(name, found.tobytes())
        return found

    def _size(self, row: dict[str, Any]) -> tuple[int, ...]:
        return UNKNOWN if row["state"] == WITHDRAWN else self._reader.size(row) or UNKNOWN


def blocks_of(rows: ListedRows, first: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    count = len(rows)
    for start in range(first, count, BLOCK_ROWS):
        yield rows.rows(start, min(start + BLOCK_ROWS, count), [*columns, "state"])


def files_digest(block: pa.Table, rule: str) -> str:
    """Hash what decides the sizes of a block: each file's columns but for its place, and the rule."""
    columns = [block[name].to_pylist() for name in block.column_names if name != "place"]
    return hashlib.sha256(repr((rule, [*zip(*columns, strict=True)])).encode()).hexdigest()


def forget_sizes(store: Store) -> None:
    """Delete what was read for a plan that is written."""
    for name in store.list(SIZES):
        store.delete(f"{SIZES}/{name}")
    store.delete(f"{SIZES}/")
