"""The Parquet files of a cache: read from exactly the path given, with every way of being broken one error."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from cache_store.errors import CacheError

LOCAL = LocalFileSystem()
"""Named, because Arrow would otherwise read a path such as `exp:1/cache` as the address of something else."""

BROKEN = (OSError, pa.ArrowException, UnicodeDecodeError, KeyError)
"""What Arrow raises for files that are absent, cut or have flipped bits."""


def open_table(path: Path) -> pq.ParquetFile:
    """A Parquet file to read row groups from, its index parsed once."""
    try:
        return pq.ParquetFile(path, filesystem=LOCAL)
    except BROKEN as error:
        raise broken(path, error) from None


def read_row_group(file: pq.ParquetFile, path: Path, number: int, columns: list[str] | None = None) -> pa.Table:
    try:
        return checked(file.read_row_group(number, columns))
    except BROKEN as error:
        raise broken(path, error) from None


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return checked(pq.read_table(path, columns=columns, filesystem=LOCAL, partitioning=None))
    except BROKEN as error:
        raise broken(path, error) from None


def checked(table: pa.Table) -> pa.Table:
    """The table, once every value is known to be what its type says, UTF-8 included."""
    table.validate(full=True)
    return table


def broken(path: Path, error: Exception) -> CacheError:
    return CacheError(f"{path} cannot be read: {' '.join(str(error).split())}")
