"""Rows of samples in a file, not in memory: a cache's plan or a temporary one, read one shard at a time."""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from io import BufferedRandom
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.errors import SourceError
from cache_store.format.plan import SIZE, PlanDigests, PlanFile, PlanHash, encode_plan
from cache_store.format.schema import Recipe, ShardRun, SizedArray, Spec, shard_runs
from cache_store.format.tables import MAX_PLAN_FOOTER_BYTES, PLAN_SCHEMA, TableFile
from cache_store.messages import SHOWN_NAMES, abridge
from cache_store.storage.publish import name_scratch_in_errors

CHUNK = 8_192
"""Samples held as Python objects at a time."""

MOST_TEXT = 2**30
"""Most characters of a table's texts; a caption takes some hundred bytes, and a table has at most a million rows."""

LISTED = pa.schema([each for each in PLAN_SCHEMA if each.name not in ("row", "size")])
"""The columns that a source gives for a sample."""

UNSIZED = ""
"""The size of rows that are only listed."""

EXTRA = pa.field("extra", pa.string())
"""A column that holds a sample's extra fields as JSON while their types are not known."""

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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of samples in a plan file, cut into shards, perhaps at other places than the file's row groups."""

    plan: PlanFile
    bounds: NDArray[np.int64]
    """First row of each shard, then the number of rows: [shards + 1]."""
    digests: PlanDigests
    """Digests of these rows and shards."""
    arrays: tuple[SizedArray, ...] = ()
    """The arrays of the cache, one for each size; none while the rows are only listed."""
    array_indices: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of each shard's array: [shards]."""
    is_on_disk: bool = False
    """Whether these rows come from the cache's plan file; otherwise they come from the source."""

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def runs(self) -> tuple[ShardRun, ...]:
        names = [each.size.name for each in self.arrays]
        return tuple(shard_runs(np.diff(self.bounds).tolist(), (names[index] for index in self.array_indices)))

    def spec(self, recipe: Recipe) -> Spec:
        """Make the spec of a cache with this recipe and these rows; arrays come in the order of their first rows."""
        arrays = [self.arrays[index] for index in dict.fromkeys(self.array_indices.tolist())]
        return recipe.spec(self.digests.whole, self.runs, arrays)

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        first, stop = self.bounds[shard : shard + 2].tolist()
        return self.plan.rows(first, stop, columns)

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return (self.shard(shard, columns) for shard in range(self.num_shards))

    def id_hashes(self) -> Hashes:
        parts = [hashes_of(table["id"].to_pylist()) for table in self.shards(["id"])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def ids_where(self, mask: NDArray[np.bool_]) -> SomeIds:
        """Count the rows marked in `mask` [rows], and return the smallest of their ids."""
        first: list[str] = []
        shards = np.searchsorted(self.bounds, np.flatnonzero(mask), side="right") - 1
        for shard in np.unique(shards).tolist():
            marked = pa.array(mask[self.bounds[shard] : self.bounds[shard + 1]])
            first = nsmallest(SHOWN_NAMES, [*first, *self.shard(shard, ["id"])["id"].filter(marked).to_pylist()])
        return SomeIds(int(np.count_nonzero(mask)), first)

    def cut_at(
        self,
        bounds: NDArray[np.int64],
        arrays: tuple[SizedArray, ...],
        array_indices: NDArray[np.int64],
    ) -> "Rows":
        """Cut the rows into these shards, and compute the digests anew."""
        cut, plan_hash = replace(self, bounds=bounds, arrays=arrays, array_indices=array_indices), PlanHash()
        for table in cut.shards():
            plan_hash.add(table)
        return replace(cut, digests=plan_hash.digests())

    def with_shards_of(self, planned: "Rows") -> "Rows":
        """Take the rows that `planned` has, cut as they are there."""
        return replace(
            self,
            bounds=planned.bounds,
            digests=planned.digests,
            arrays=planned.arrays,
            array_indices=planned.array_indices,
        )

    def cut_like(self, planned: "Rows", samples_per_shard: int, added: "Added | None" = None) -> "Rows | None":
        """Cut these rows as `planned`, and the rows that follow into new shards; None unless they begin with its rows.

        Compares digests, so every row is read unless both have the same rows.
        """
        if self.digests.whole == planned.digests.whole:
            return self.with_shards_of(planned)
        if len(self) <= len(planned):
            return None
        added = added or even_cut(len(self) - len(planned), samples_per_shard)
        grown = replace(
            self,
            bounds=np.concatenate([planned.bounds, len(planned) + np.cumsum(added.lengths)]),
            arrays=added.arrays or planned.arrays,
            array_indices=np.concatenate([planned.array_indices, added.indices]),
        )
        plan_hash = PlanHash()
        for shard, table in enumerate(grown.shards()):
            plan_hash.add(table)
            if shard + 1 == planned.num_shards and plan_hash.digests() != planned.digests:
                return None
        return replace(grown, digests=plan_hash.digests())


@dataclass(frozen=True, kw_only=True)
class Added:
    """How rows that follow those of a plan are cut."""

    lengths: NDArray[np.int64]
    """Rows of each shard: [shards]."""
    indices: NDArray[np.int64]
    """Index of each shard's array: [shards]."""
    arrays: tuple[SizedArray, ...] = ()
    """All arrays of the cache; none if there are no others than before."""


def even_cut(rows: int, samples_per_shard: int) -> Added:
    """Cut rows of the first array into full shards, and a shorter last one if any are left."""
    bounds = np.append(np.arange(0, rows, samples_per_shard), rows)
    return Added(lengths=np.diff(bounds), indices=np.zeros(len(bounds) - 1, np.int64))


def rows_on_disk(plan: PlanFile, digests: PlanDigests, array_of: Callable[[str], SizedArray]) -> Rows:
    """Take the rows of a cache's plan file; `array_of` describes the array of a name."""
    names = [*dict.fromkeys(plan.sizes)]
    places = {name: index for index, name in enumerate(names)}
    return Rows(
        plan=plan,
        bounds=plan.bounds,
        digests=digests,
        arrays=tuple(map(array_of, names)),
        array_indices=np.array([places[name] for name in plan.sizes], np.int64),
        is_on_disk=True,
    )


def rows_in_scratch(shards: Iterable[pa.Table]) -> Rows:
    """Write samples, shard after shard, to a temporary file."""
    plan_hash = PlanHash()

    def hashed() -> Iterator[pa.Table]:
        for shard in shards:
            plan_hash.add(shard)
            yield shard

    plan = plan_in_scratch(hashed())
    return Rows(plan=plan, bounds=plan.bounds, digests=plan_hash.digests())


def plan_in_scratch(tables: Iterable[pa.Table]) -> PlanFile:
    """Write samples to a temporary file, one row group per table; the file is deleted with the plan."""
    file = ScratchFile()
    with name_scratch_in_errors(), file.stream() as stream:  # closing it writes the last bytes
        encode_plan(stream, tables, repeat(UNSIZED))
    return PlanFile(TableFile(file.stream, "the list of samples", MAX_PLAN_FOOTER_BYTES))


def number_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Number the samples' rows from 0."""
    first = 0
    for table in tables:
        row = pa.array(np.arange(first, first + table.num_rows))
        names = [name for name in table.column_names if name not in ("row", "size")]
        numbered = table.select(names).add_column(0, PLAN_SCHEMA.field("row"), row)
        yield numbered.add_column(SIZE, PLAN_SCHEMA.field("size"), pa.repeat(UNSIZED, table.num_rows))
        first += table.num_rows


def listed_table(samples: Iterator[dict[str, Any]], schema: pa.Schema = LISTED) -> pa.Table:
    """Make one table of all samples; raise SourceError if their texts would fill the memory."""
    bounded = with_bounded_texts(samples)
    chunks = iter(lambda: list(islice(bounded, CHUNK)), [])
    batches = [pa.RecordBatch.from_pylist(chunk, schema=schema) for chunk in chunks]
    return pa.Table.from_batches(batches, schema=schema).combine_chunks()


def with_bounded_texts(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    held = 0
    for sample in samples:
        size = sum(len(turn["value"] or "") for turn in sample["conversations"] or ())
        size += len(sample.get(EXTRA.name) or "")
        if (held := held + size) > MOST_TEXT:
            raise SourceError(
                f"neighbouring samples have more than {MOST_TEXT:,} characters of text together, sample "
                f"{abridge([sample['id']])} alone {size:,}; cut the texts"
            )
        yield sample


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
