"""The plan on disk: which samples, in which rows. One row group per shard, so that a worker reads only its own."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.errors import CacheError
from cache_store.format.schema import CommitContent
from cache_store.format.tables import PLAN_SCHEMA, TableFile

ASKING = frozenset({"human", "user", "system"})
"""Whose turns of a conversation are no answers."""

DIGESTED = ("row", "id", "uri", "conversations")
"""Columns that make two plans the same; fingerprints may hold a file's time and do not."""


def answers_of(conversation: Sequence[Mapping[str, str]] | None) -> list[str]:
    """What is answered in a conversation, turn by turn; a caption is an answer, too."""
    return [turn["value"] or "" for turn in conversation or [] if turn["from"] not in ASKING]


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


class PlanHash:
    """The digests of a plan whose shards come one after the other."""

    def __init__(self) -> None:
        self._whole, self._shards = hashlib.sha256(), list[str]()

    def add(self, rows: pa.Table) -> None:
        """The next shard's."""
        shard = hashlib.sha256()
        for lines in digested_lines(rows):
            self._whole.update(lines)
            shard.update(lines)
        self._shards.append(shard.hexdigest())

    def digests(self) -> PlanDigests:
        return PlanDigests(self._whole.hexdigest(), tuple(self._shards))


def digested_lines(table: pa.Table) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder(order="sorted")
    for batch in table.select(list(DIGESTED)).to_batches(max_chunksize=4_096):
        yield encoder.encode_lines(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def encode_plan(stream: BinaryIO, shards: Iterable[pa.Table]) -> None:
    with pq.ParquetWriter(stream, PLAN_SCHEMA, compression="zstd") as writer:
        for shard in shards:
            writer.write_table(shard, row_group_size=shard.num_rows)


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

    def is_cut(self, samples_per_shard: int) -> bool:
        """Whether its row groups are shards of so many rows."""
        counts = [self._file.metadata.row_group(number).num_rows for number in range(self.num_shards)]
        return all(each == samples_per_shard for each in counts[:-1]) and max(counts, default=0) <= samples_per_shard

    def digests(self, rows: int | None = None) -> PlanDigests:
        """Of its first rows, or of all, in the memory of one shard; every column of every row is read."""
        plan_hash, left = PlanHash(), self.num_rows if rows is None else rows
        for shard in range(self.num_shards):
            table = self.shard(shard)
            if left > 0:
                plan_hash.add(table.slice(0, left))
            left -= table.num_rows
        return plan_hash.digests()

    def shard(self, shard: int, columns: list[str] | None = None) -> pa.Table:
        """One shard's row group."""
        return self._file.row_group(shard, columns)

    def recorded_rows(self, content: CommitContent) -> pa.Table:
        """The rows that a shard was made for; CacheError where the plan has others, its fingerprints aside."""
        rows = self.shard(content.shard, list(DIGESTED)) if content.shard < self.num_shards else None
        if rows is None or plan_digest(rows) != content.plan_digest:
            raise CacheError(f"{self._file.where} has other rows for shard {content.shard} than the shard was made for")
        return rows
