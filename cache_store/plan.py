"""The plan on disk: which samples, in which rows. One row group per shard, so that a worker reads only its own."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.errors import CacheError
from cache_store.publish import publish
from cache_store.schema import PLAN_FILE, PLAN_SCHEMA

DIGESTED = ("row", "id", "uri", "conversations")
"""Columns that make two plans the same; fingerprints may hold a file's time and do not."""


def plan_digest(tables: Iterable[pa.Table]) -> str:
    """SHA-256 over the plan's meaning, one JSON line a row: independent of Parquet and its version."""
    digest = hashlib.sha256()
    for table in tables:
        for batch in table.select(list(DIGESTED)).to_batches(max_chunksize=4_096):
            for row in batch.to_pylist():
                digest.update(msgspec.json.encode([row[name] for name in DIGESTED], order="sorted") + b"\n")
    return digest.hexdigest()


def write_plan(path: Path, shards: Iterable[pa.Table]) -> None:
    with publish(path) as stream, pq.ParquetWriter(stream, PLAN_SCHEMA, compression="zstd") as writer:
        for shard in shards:
            writer.write_table(shard, row_group_size=shard.num_rows)


def read_plan(root: Path, shard: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """The plan, or one shard's row group of it."""
    file = open_plan(root)
    try:
        return file.read(columns) if shard is None else file.read_row_group(shard, columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise CacheError(f"{root / PLAN_FILE} cannot be read: {error}") from None


def open_plan(root: Path) -> pq.ParquetFile:
    """For whoever reads shard after shard: the file's index is parsed once."""
    try:
        return pq.ParquetFile(root / PLAN_FILE)
    except (OSError, pa.ArrowInvalid) as error:
        raise CacheError(f"{root / PLAN_FILE} cannot be read: {error}") from None
