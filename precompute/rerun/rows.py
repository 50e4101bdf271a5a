"""Rows of samples in a file, not in memory: a cache's plan or a temporary one, read one shard at a time."""

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from io import BufferedRandom
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.plan import PlanDigests, PlanFile, PlanHash, encode_plan
from cache_store.format.schema import Recipe, Spec
from cache_store.format.tables import PLAN_SCHEMA, TableFile
from cache_store.storage.publish import name_scratch_in_errors

CHUNK = 8_192
"""Samples held as Python objects at a time."""

SHOWN_IDS = 5
"""Ids named in a message before it says how many more there are."""

LISTED = pa.schema([field for field in PLAN_SCHEMA if field.name != "row"])
"""The columns that a source gives for a sample."""

Hashes = NDArray[np.int64]
"""8 bytes per sample, where millions of ids would not fit in memory. Among ten million ids, two have the same hash in
about one of 400,000 processes, so every match is confirmed by the ids or by a digest."""


class SomeIds(NamedTuple):
    """The number of samples in a group, and the first of their ids."""

    total: int
    first: Sequence[str]

    def __str__(self) -> str:
        return abridge(self.first, self.total)


NO_IDS = SomeIds(0, ())


def hashes_of(values: Iterable[object]) -> Hashes:
    """Hash values with Python's `hash`, which differs from process to process."""
    return np.fromiter(map(hash, values), np.int64)


def abridge(names: Sequence[str], count: int | None = None) -> str:
    """Format the first SHOWN_IDS of `count` names and the number of the rest; `names` may hold only the first ones."""
    count = len(names) if count is None else count
    shown = [name if name.isprintable() else ascii(name) for name in names[:SHOWN_IDS]]  # one line, whatever they hold
    more = f" and {count - SHOWN_IDS} more" if count > SHOWN_IDS else ""
    return ", ".join(shown) + more


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The first rows of a plan file, whose row groups are shards."""

    plan: PlanFile
    count: int
    samples_per_shard: int
    digests: PlanDigests
    """Digests of these rows."""
    is_on_disk: bool = False
    """Whether these rows come from the cache's plan file; otherwise they come from the source."""
    file_sha256: str | None = None
    """SHA-256 of a temporary file of exactly these rows; a plan file with the same SHA-256 has the same rows."""

    def __len__(self) -> int:
        return self.count

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.samples_per_shard)

    @property
    def known_plan(self) -> dict[str, PlanDigests]:
        """Digests of these rows by the SHA-256 of their plan file; empty if that is unknown."""
        return {self.file_sha256: self.digests} if self.file_sha256 else {}

    def spec(self, recipe: Recipe) -> Spec:
        """Make the spec of a cache with this recipe and these rows."""
        return recipe.spec(self.count, self.digests.whole)

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a shard; return an empty table beyond the last one."""
        if shard >= self.num_shards:
            return PLAN_SCHEMA.empty_table().select(columns or PLAN_SCHEMA.names)
        rows = self.plan.shard(shard, None if columns is None else list(columns))
        return rows.slice(0, self.count - shard * self.samples_per_shard)

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return (self.shard(shard, columns) for shard in range(self.num_shards))

    def ids(self) -> Iterator[str]:
        return (name for table in self.shards(["id"]) for name in table["id"].to_pylist())

    def id_hashes(self) -> Hashes:
        """Hash every row's id."""
        parts = [hashes_of(table["id"].to_pylist()) for table in self.shards(["id"])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def first(self, count: int) -> "Rows":
        """Keep the first `count` rows and compute their digests."""
        return self if count == self.count else self.cut(count, self.plan.digests(count))

    def cut(self, count: int, digests: PlanDigests) -> "Rows":
        """Keep the first `count` rows, whose digests are known."""
        return replace(self, count=count, digests=digests, file_sha256=None)

    def ids_where(self, mask: NDArray[np.bool_]) -> SomeIds:
        """Count the rows marked in `mask` [rows], and return the smallest of their ids."""
        first: list[str] = []
        for shard in np.unique(np.flatnonzero(mask) // self.samples_per_shard).tolist():
            start = shard * self.samples_per_shard
            marked = pa.array(mask[start : min(start + self.samples_per_shard, self.count)])
            first = nsmallest(SHOWN_IDS, [*first, *self.shard(shard, ["id"])["id"].filter(marked).to_pylist()])
        return SomeIds(int(np.count_nonzero(mask)), first)

    def begins_with(self, rows: "Rows") -> bool:
        """Return whether these rows begin with `rows`, by digest; both must have the same `samples_per_shard`."""
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
    """Take the first `count` rows of a cache's plan file."""
    return Rows(plan=plan, count=count, samples_per_shard=samples_per_shard, digests=digests, is_on_disk=True)


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
    """Write samples to a temporary file, one row group per table; the file is deleted with the plan."""
    file = ScratchFile()
    with name_scratch_in_errors(), file.stream() as stream:  # closing it writes the last bytes
        encode_plan(stream, tables)
    return PlanFile(TableFile(file.stream, "the list of samples")), file


def number_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Number the samples' rows from 0."""
    first = 0
    for table in tables:
        row = pa.array(np.arange(first, first + table.num_rows))
        yield table.select(LISTED.names).add_column(0, PLAN_SCHEMA.field("row"), row)
        first += table.num_rows


def listed_table(samples: Iterator[dict[str, object]]) -> pa.Table:
    """Make one table of all samples."""
    chunks = iter(lambda: list(islice(samples, CHUNK)), [])
    batches = [pa.RecordBatch.from_pylist(chunk, schema=LISTED) for chunk in chunks]
    return pa.Table.from_batches(batches, schema=LISTED).combine_chunks()


def slices_of(table: pa.Table, size: int) -> Iterator[pa.Table]:
    return (table.slice(first, size) for first in range(0, table.num_rows, size))


class ScratchFile:
    """A file without a name; the system deletes it with its last open descriptor, however the program ends."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as stream:
            descriptor = os.dup(stream.fileno())
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def stream(self) -> BufferedRandom:
        """Open it to write or read, one user at a time: all streams share one position."""
        stream = os.fdopen(os.dup(self._descriptor), "r+b")
        stream.seek(0)
        return stream
