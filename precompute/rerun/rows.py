"""Rows of samples in files, not in memory: a cache's plan or a temporary one, read one shard at a time."""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from io import BufferedRandom
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache_store.errors import SourceError
from cache_store.format.plan import DIGESTED, Plan, PlanDigests, PlanHash, ShardedRows, extra_columns
from cache_store.format.schema import Recipe, ShardRun, SizedArray, Spec, shard_runs
from cache_store.format.tables import CLIP_START, PLAN_SCHEMA, PLANNED, TEXTS_SCHEMA, TableFile
from cache_store.messages import SHOWN_NAMES, abridge
from cache_store.storage.publish import name_scratch_in_errors

CHUNK = 8_192
"""Samples held as Python objects at a time."""

MOST_TEXT = 2**30
"""Most characters of a table's texts; a caption takes some hundred bytes, and a table has at most a million rows."""

LISTED = pa.schema([*(each for each in PLAN_SCHEMA if each.name not in (CLIP_START, "size")), *TEXTS_SCHEMA])
"""The columns that a source gives for a sample."""

MAX_SCRATCH_FOOTER_BYTES = 2**31
"""Largest footer of a list of samples, which has a row group for each shard; while it is sorted, for each page."""

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


class ListedRows(ShardedRows):
    """Rows in a temporary file."""

    def __init__(self, file: TableFile, parts: Sequence[int]) -> None:
        """`parts` are the rows of each part, if the source has them in parts."""
        self._file, self.extra, self.parts = file, extra_columns(file.schema), parts
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        self.bounds = np.cumsum([0, *(group.num_rows for group in groups)])

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._file.row_group(shard, None if columns is None else [*columns]).select(columns or self._names)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return (self.shard(shard, columns) for shard in range(self.num_shards))

    def part_lengths(self, first: int, rows_per_part: int) -> list[int]:
        """Return the rows of each part from row `first` on: as the source has them, else so many each."""
        if self.parts:
            lengths: list[int] = np.diff(np.unique(np.maximum(np.cumsum([0, *self.parts]), first))).tolist()
            return lengths
        return [min(rows_per_part, len(self) - start) for start in range(first, len(self), rows_per_part)]

    @property
    def _names(self) -> list[str]:
        names: list[str] = self._file.schema.names
        return names


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How rows are cut into parts and shards."""

    lengths: NDArray[np.int64]
    """Rows of each shard: [shards]."""
    indices: NDArray[np.int64]
    """Index of each shard's array: [shards]."""
    parts: tuple[int, ...]
    """Number of shards of each part."""
    arrays: tuple[SizedArray, ...] = ()
    """The arrays of the cache, one for each size."""

    @classmethod
    def of(cls, spec: Spec) -> "Cut":
        parts = tuple(part.shards for part in spec.parts)
        return cls(lengths=np.diff(spec.bounds), indices=spec.array_indices, parts=parts, arrays=spec.arrays)

    def with_more(self, added: "Cut") -> "Cut":
        """Return a cut whose last parts are those added, which know all arrays."""
        return Cut(
            lengths=np.concatenate([self.lengths, added.lengths]),
            indices=np.concatenate([self.indices, added.indices]),
            parts=(*self.parts, *added.parts),
            arrays=added.arrays or self.arrays,
        )

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First row of each shard, then the number of rows: [shards + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])

    def shards_of(self, part: int) -> range:
        first = sum(self.parts[:part])
        return range(first, first + self.parts[part])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of samples, cut into parts and shards, perhaps at other places than their file's row groups."""

    plan: ShardedRows
    cut: Cut
    digests: PlanDigests
    is_on_disk: bool = False
    """Whether these rows come from the cache's plan; otherwise they come from the source."""

    def __len__(self) -> int:
        return int(self.cut.bounds[-1])

    @property
    def num_shards(self) -> int:
        return len(self.cut.lengths)

    @cached_property
    def runs(self) -> tuple[ShardRun, ...]:
        names = [each.size.name for each in self.cut.arrays]
        return tuple(shard_runs(self.cut.lengths.tolist(), (names[index] for index in self.cut.indices)))

    def spec(self, recipe: Recipe) -> Spec:
        """Make the spec of a cache with this recipe and these rows; arrays come in the order of their first rows."""
        arrays = [self.cut.arrays[index] for index in dict.fromkeys(self.cut.indices.tolist())]
        return recipe.spec(self.digests.parts, self.runs, arrays)

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        first, stop = self.cut.bounds[shard : shard + 2].tolist()
        return self.plan.rows(first, stop, columns)

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return (self.shard(shard, columns) for shard in range(self.num_shards))

    def id_hashes(self) -> Hashes:
        return id_hashes(self.shards(["id"]))

    def begins_with(self, planned: "Rows") -> bool:
        """Return whether the first rows are those of `planned`, cut alike."""
        return self.digests.parts[: len(planned.digests.parts)] == planned.digests.parts


def ids_where(rows: Rows | ListedRows, bounds: NDArray[np.int64], mask: NDArray[np.bool_]) -> SomeIds:
    """Count the rows marked in `mask` [rows], and return the smallest of their ids; `bounds` are those of `rows`."""
    first: list[str] = []
    shards = np.searchsorted(bounds, np.flatnonzero(mask), side="right") - 1
    for shard in np.unique(shards).tolist():
        marked = pa.array(mask[bounds[shard] : bounds[shard + 1]])
        first = nsmallest(SHOWN_NAMES, [*first, *rows.shard(shard, ["id"])["id"].filter(marked).to_pylist()])
    return SomeIds(int(np.count_nonzero(mask)), first)


def id_hashes(tables: Iterable[pa.Table]) -> Hashes:
    return np.concatenate([np.empty(0, np.int64), *(hashes_of(table["id"].to_pylist()) for table in tables)])


def cut_rows(plan: ShardedRows, cut: Cut) -> Rows:
    """Cut rows, and compute their digests from every row."""
    plan_hash, bounds = PlanHash(), cut.bounds.tolist()
    for part in range(len(cut.parts)):
        for shard in cut.shards_of(part):
            plan_hash.add(plan.rows(bounds[shard], bounds[shard + 1], DIGESTED))
        plan_hash.end_part()
    return Rows(plan=plan, cut=cut, digests=plan_hash.digests())


def cut_like(plan: ShardedRows, planned: Rows, added: Cut | None = None) -> Rows | None:
    """Cut rows as `planned`, and those that follow as `added`; None unless they begin with its rows."""
    if plan.bounds[-1] < len(planned):
        return None
    rows = cut_rows(plan, planned.cut.with_more(added) if added else planned.cut)
    return rows if rows.begins_with(planned) else None


def even_cut(part_lengths: Iterable[int], samples_per_shard: int, arrays: tuple[SizedArray, ...] = ()) -> Cut:
    """Cut parts of the first array into full shards, and a shorter last one if any rows are left."""
    lengths, parts = list[int](), list[int]()
    for rows in part_lengths:
        full, rest = divmod(rows, samples_per_shard)
        each = [samples_per_shard] * full + [rest] * bool(rest)
        lengths += each
        parts.append(len(each))
    indices = np.zeros(len(lengths), np.int64)
    return Cut(lengths=np.array(lengths, np.int64), indices=indices, parts=tuple(parts), arrays=arrays)


def rows_on_disk(plan: Plan, digests: PlanDigests, array_of: Callable[[str], SizedArray]) -> Rows:
    """Take the rows of a cache's plan; `array_of` describes the array of a name."""
    names = [*dict.fromkeys(plan.sizes)]
    places = {name: index for index, name in enumerate(names)}
    cut = Cut(
        lengths=np.diff(plan.bounds),
        indices=np.array([places[name] for name in plan.sizes], np.int64),
        parts=tuple(part.shards for part in digests.parts),
        arrays=tuple(map(array_of, names)),
    )
    return Rows(plan=plan, cut=cut, digests=digests, is_on_disk=True)


def rows_in_scratch(tables: Iterable[pa.Table], parts: Sequence[int] = ()) -> ListedRows:
    """Write samples to a temporary file, one row group per table; the file is deleted with the rows."""
    file, writer = ScratchFile(), None
    with name_scratch_in_errors(), file.stream() as stream, ExitStack() as opened:  # closing them writes the last bytes
        for table in tables:
            if writer is None:
                options = {"compression": "zstd", "write_statistics": False}
                writer = opened.enter_context(pq.ParquetWriter(stream, table.schema, **options))
            writer.write_table(table, row_group_size=max(1, table.num_rows))
        if writer is None:
            opened.enter_context(pq.ParquetWriter(stream, LISTED))
    return ListedRows(TableFile(file.stream, "the list of samples", MAX_SCRATCH_FOOTER_BYTES), parts)


def as_planned(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Give listed rows the columns of a plan, then those of its texts."""
    for table in tables:
        count, extra = table.num_rows, [name for name in extra_columns(table.schema) if name != CLIP_START]
        has_starts = CLIP_START in table.column_names
        columns = {
            **{name: table[name] for name in ("id", "uri", "fingerprint", "place", "conversations", *extra)},
            CLIP_START: table[CLIP_START].cast(pa.float64()) if has_starts else pa.nulls(count, pa.float64()),
            "state": table["state"].fill_null(PLANNED),
            "size": pa.repeat(UNSIZED, count),
        }
        fields = [*PLAN_SCHEMA, *TEXTS_SCHEMA, *(table.schema.field(name) for name in extra)]
        yield pa.table([columns[field.name] for field in fields], schema=pa.schema(fields))


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
