"""The plan on disk: which samples, in which rows. One row group per shard, so that a worker reads only its own."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.errors import CacheError
from cache_store.format.schema import CommitContent
from cache_store.format.tables import PLAN_SCHEMA, TableFile, parse_table

DIGESTED = ("row", "id", "uri", "conversations")
"""Columns that make two plans the same; fingerprints may hold a file's time and do not."""


def plan_digest(table: pa.Table) -> str:
    """SHA-256 over the meaning of a plan's rows, one JSON line a row: independent of Parquet and its version."""
    digest = hashlib.sha256()
    for lines in digested_lines(table):
        digest.update(lines)
    return digest.hexdigest()


@dataclass(frozen=True)
class PlanDigests:
    """SHA-256 over the meaning of a plan's rows."""

    whole: str
    shards: tuple[str, ...]
    """Of each shard's rows."""


def plan_digests(plan: pa.Table, samples_per_shard: int) -> PlanDigests:
    """Both in one pass."""
    return digests_of(plan.slice(first, samples_per_shard) for first in range(0, plan.num_rows, samples_per_shard))


def digests_of(tables: Iterable[pa.Table]) -> PlanDigests:
    """Of every shard's rows, in order."""
    whole, shards = hashlib.sha256(), []
    for table in tables:
        shard = hashlib.sha256()
        for lines in digested_lines(table):
            whole.update(lines)
            shard.update(lines)
        shards.append(shard.hexdigest())
    return PlanDigests(whole.hexdigest(), tuple(shards))


def digested_lines(table: pa.Table) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder(order="sorted")
    for batch in table.select(list(DIGESTED)).to_batches(max_chunksize=4_096):
        yield encoder.encode_lines(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def encode_plan(stream: BinaryIO, shards: Iterable[pa.Table]) -> None:
    with pq.ParquetWriter(stream, PLAN_SCHEMA, compression="zstd") as writer:
        for shard in shards:
            writer.write_table(shard, row_group_size=shard.num_rows)


def parse_plan(data: bytes, where: str) -> pa.Table:
    """The whole plan, of the file's bytes."""
    table = parse_table(data, where)
    refuse_other_columns(where, table.schema)
    return table


def refuse_other_columns(where: str, schema: pa.Schema) -> None:
    if schema != PLAN_SCHEMA:
        raise CacheError(f"{where} has other columns than the format's")


class PlanFile:
    """The plan, shard by shard: for whoever reads one after the other."""

    def __init__(self, file: TableFile) -> None:
        """CacheError where it is no plan."""
        self._file = file
        refuse_other_columns(file.where, file.schema)

    @property
    def num_shards(self) -> int:
        return int(self._file.metadata.num_row_groups)

    @property
    def num_rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def digests(self) -> PlanDigests:
        """In the memory of one shard."""
        return digests_of(self.shard(shard, list(DIGESTED)) for shard in range(self.num_shards))

    def shard(self, shard: int, columns: list[str] | None = None) -> pa.Table:
        """One shard's row group."""
        return self._file.row_group(shard, columns)

    def recorded_rows(self, content: CommitContent) -> pa.Table:
        """The rows that a shard was made for; CacheError where the plan has others, its fingerprints aside."""
        rows = self.shard(content.shard, list(DIGESTED)) if content.shard < self.num_shards else None
        if rows is None or plan_digest(rows) != content.plan_digest:
            raise CacheError(f"{self._file.where} has other rows for shard {content.shard} than the shard was made for")
        return rows
