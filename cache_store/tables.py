"""The Parquet files of a cache: read from exactly the path given, with every way of being broken one error."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from cache_store.errors import CacheError
from cache_store.schema import MAX_SAMPLES_PER_SHARD

LOCAL = LocalFileSystem()
"""Named, because Arrow would otherwise read a path such as `exp:1/cache` as the address of something else."""

MAX_ROW_GROUP_BYTES = 2**32
"""Decompressed: 4 KB of text for each of a million samples."""

BROKEN = (OSError, pa.ArrowException, UnicodeDecodeError, KeyError)
"""What Arrow raises for files that are absent, cut or have flipped bits."""


def open_table(path: Path) -> pq.ParquetFile:
    """A Parquet file to read row groups from, its index parsed once and its claims bounded."""
    try:
        file = pq.ParquetFile(path, filesystem=LOCAL)
        refuse_large(path, file.metadata)
    except BROKEN as error:
        raise broken(path, error) from None
    return file


def refuse_large(path: Path, metadata: pq.FileMetaData) -> None:
    """A row group is a shard's at most."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not 0 <= group.num_rows <= MAX_SAMPLES_PER_SHARD or not 0 <= group.total_byte_size <= MAX_ROW_GROUP_BYTES:
            raise CacheError(
                f"{path} cannot be read: row group {number} claims {group.num_rows:,} rows in "
                f"{group.total_byte_size:,} bytes, more than {MAX_SAMPLES_PER_SHARD:,} in {MAX_ROW_GROUP_BYTES:,}"
            )


def read_row_group(file: pq.ParquetFile, path: Path, number: int, columns: list[str] | None = None) -> pa.Table:
    try:
        return checked(file.read_row_group(number, columns))
    except BROKEN as error:
        raise broken(path, error) from None


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    file = open_table(path)
    try:
        return checked(file.read(columns))
    except BROKEN as error:
        raise broken(path, error) from None


def checked(table: pa.Table) -> pa.Table:
    """The table, once every value is known to be what its type says, UTF-8 included."""
    table.validate(full=True)
    return table


def broken(path: Path, error: Exception) -> CacheError:
    return CacheError(f"{path} cannot be read: {' '.join(str(error).split())}")
