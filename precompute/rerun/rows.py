"""Samples in rows, in a file and not in memory: a cache's plan or a temporary one, read a shard at a time."""

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from io import BufferedRandom
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.plan import PlanDigests, PlanFile, PlanHash, encode_plan
from cache_store.format.schema import Recipe, Spec
from cache_store.format.tables import PLAN_SCHEMA, TableFile
from cache_store.storage.files import naming_scratch
from precompute.rerun.ids import SHOWN_IDS, Hashes, SomeIds, hashes_of

CHUNK = 8_192
"""Samples held as Python objects at a time."""

LISTED = pa.schema([field for field in PLAN_SCHEMA if field.name != "row"])
"""What a source says of a sample."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The first rows of a plan file, whose row groups are shards."""

    plan: PlanFile
    count: int
    samples_per_shard: int
    digests: PlanDigests
    """Of these rows."""
    on_disk: bool = False
    """As the cache's plan file has them; else as the source has them."""
    file_sha256: str | None = None
    """Of a temporary file that holds these rows and no others: a cache's plan of the same bytes has the same rows."""

    def __len__(self) -> int:
        return self.count

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.samples_per_shard)

    @property
    def known_plan(self) -> dict[str, PlanDigests]:
        """The digests by the SHA-256 of a plan file that has these rows, as far as it is known."""
        return {self.file_sha256: self.digests} if self.file_sha256 else {}

    def spec(self, recipe: Recipe) -> Spec:
        """Of a cache of that recipe with these rows."""
        return recipe.spec(self.count, self.digests.whole)

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a shard; none beyond the last one."""
        if shard >= self.num_shards:
            return PLAN_SCHEMA.empty_table().select(columns or PLAN_SCHEMA.names)
        rows = self.plan.shard(shard, None if columns is None else list(columns))
        return rows.slice(0, self.count - shard * self.samples_per_shard)

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return (self.shard(shard, columns) for shard in range(self.num_shards))

    def first(self, count: int) -> "Rows":
        """The first `count` rows, digested anew."""
        if count == self.count:
            return self
        return replace(self, count=count, digests=self.plan.digests(count), file_sha256=None)

    def id_hashes(self) -> Hashes:
        """Of every row's id."""
        parts = [hashes_of(table["id"].to_pylist()) for table in self.shards(["id"])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def ids_where(self, mask: NDArray[np.bool_]) -> SomeIds:
        """The least ids of the rows that are marked in `mask` [rows]."""
        first: list[str] = []
        for shard in np.unique(np.flatnonzero(mask) // self.samples_per_shard).tolist():
            start = shard * self.samples_per_shard
            marked = pa.array(mask[start : min(start + self.samples_per_shard, self.count)])
            first = nsmallest(SHOWN_IDS, [*first, *self.shard(shard, ["id"])["id"].filter(marked).to_pylist()])
        return SomeIds(int(np.count_nonzero(mask)), first)

    def begins_with(self, rows: "Rows") -> bool:
        """Whether these samples begin with those, by their digests; of as many samples a shard."""
        if rows.count == self.count:
            return self.digests == rows.digests
        full, rest = divmod(rows.count, rows.samples_per_shard)
        if rows.count > self.count or self.digests.shards[:full] != rows.digests.shards[:full]:
            return False
        if rest == 0:
            return True
        last = PlanHash()
        last.add(self.shard(full).slice(0, rest))
        return last.digests().shards == rows.digests.shards[full:]


def rows_on_disk(plan: PlanFile, samples_per_shard: int, count: int, digests: PlanDigests) -> Rows:
    """The first `count` rows of a cache's plan file."""
    return Rows(plan=plan, count=count, samples_per_shard=samples_per_shard, digests=digests, on_disk=True)


def rows_in_scratch(shards: Iterable[pa.Table], samples_per_shard: int) -> Rows:
    """Write samples, shard after shard, to a temporary file."""
    plan_hash = PlanHash()

    def hashed() -> Iterator[pa.Table]:
        for shard in shards:
            plan_hash.add(shard)
            yield shard

    plan, file = plan_in_scratch(hashed())
    with file.stream() as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    rows = Rows(plan=plan, count=plan.num_rows, samples_per_shard=samples_per_shard, digests=plan_hash.digests())
    return replace(rows, file_sha256=sha256)


def plan_in_scratch(tables: Iterable[pa.Table]) -> "tuple[PlanFile, ScratchFile]":
    """Write samples, a row group a table, to a temporary file, which goes with the plan."""
    file = ScratchFile()
    with naming_scratch(), file.stream() as stream:  # of which the last bytes are written when it is closed
        encode_plan(stream, tables)
    return PlanFile(TableFile(file.stream, "the list of samples")), file


def numbered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Samples with their rows, from 0."""
    first = 0
    for table in tables:
        row = pa.array(np.arange(first, first + table.num_rows))
        yield table.select(LISTED.names).add_column(0, PLAN_SCHEMA.field("row"), row)
        first += table.num_rows


def table_of(samples: Iterator[dict[str, object]]) -> pa.Table:
    chunks = iter(lambda: list(islice(samples, CHUNK)), [])
    batches = [pa.RecordBatch.from_pylist(chunk, schema=LISTED) for chunk in chunks]
    return pa.Table.from_batches(batches, schema=LISTED).combine_chunks()


def slices_of(table: pa.Table, size: int) -> Iterator[pa.Table]:
    return (table.slice(first, size) for first in range(0, table.num_rows, size))


class ScratchFile:
    """A file without a name, which the system deletes with the last that refers to it, however a program ends."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as stream:
            descriptor = os.dup(stream.fileno())
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def stream(self) -> BufferedRandom:
        """To write or to read it, by one at a time: all that open it share its position."""
        stream = os.fdopen(os.dup(self._descriptor), "r+b")
        stream.seek(0)
        return stream
