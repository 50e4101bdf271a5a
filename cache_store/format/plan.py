"""The plan file: which sample is in which row. It has one row group per shard, so that a worker reads only its own."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache_store.errors import CacheError
from cache_store.format.array import TextRecipe
from cache_store.format.schema import CommitContent, Spec
from cache_store.format.tables import EXTRA_TYPES, PLAN_COLUMNS, PLAN_SCHEMA, TableFile, extra_problem

SIZE = PLAN_SCHEMA.get_field_index("size")

KEPT_OF_WITHDRAWN = ("row", "id", "uri", "size")
"""Columns that a withdrawn sample keeps: they say what must not come back."""

NOT_ANSWERS = frozenset({"human", "user", "system"})
"""Senders of a conversation's turns that are not answers."""


def answers_of(conversation: Sequence[Mapping[str, str]] | None) -> list[str]:
    """Return a conversation's answers in order; a caption is an answer, too."""
    return [turn["value"] or "" for turn in conversation or [] if turn["from"] not in NOT_ANSWERS]


def caption_of(conversation: Sequence[Mapping[str, str]] | None, number: int = 0) -> str | None:
    """Return a sample's caption, counted from 0; after the last, its first comes again. None if it has none."""
    answers = answers_of(conversation)
    return answers[number % len(answers)] if answers else None


def text_of(recipe: TextRecipe, sample: str, conversation: Sequence[Mapping[str, str]] | None) -> str | None:
    """Return the text of a sample, by id, that the recipe encodes, before it is cleaned; None if it has none."""
    text = caption_of(conversation, recipe.caption - 1)
    if text is None or recipe.shuffle_tags is None:
        return text
    return shuffled_tags(text, recipe.keep_tags, f"{recipe.shuffle_tags}\n{sample}")


def shuffled_tags(text: str, keep: int, key: str) -> str:
    """Return the tags of a text in an order that is a function of `key` and their number; the first `keep` stay."""
    tags = [tag.strip() for tag in text.split(",")]
    first, places = tags[:keep], range(keep, len(tags))
    order = sorted(places, key=lambda place: hashlib.sha256(f"{key}\n{place}".encode()).digest())
    return ", ".join([*first, *(tags[place] for place in order)])


def plan_digest(table: pa.Table) -> str:
    """Hash a plan's rows as JSON lines (SHA-256), which does not depend on Parquet or its version."""
    digest = hashlib.sha256()
    for lines in digested_lines(table):
        digest.update(lines)
    return digest.hexdigest()


@dataclass(frozen=True)
class PlanDigests:
    """Digests of a plan: of all rows, and of each shard's rows."""

    whole: str
    shards: tuple[str, ...]
    """Digest of each shard's rows, in order."""


class PlanHash:
    """Compute the digests of a plan that is added shard by shard."""

    def __init__(self) -> None:
        self._whole, self._shards = hashlib.sha256(), list[str]()

    def add(self, rows: pa.Table) -> None:
        """Add the rows of the next shard."""
        shard = hashlib.sha256()
        for lines in digested_lines(rows):
            self._whole.update(lines)
            shard.update(lines)
        self._shards.append(shard.hexdigest())

    def digests(self) -> PlanDigests:
        return PlanDigests(self._whole.hexdigest(), tuple(self._shards))


def digested_lines(table: pa.Table) -> Iterator[bytes]:
    encoder, extra = msgspec.json.Encoder(order="sorted"), extra_columns(table.schema)
    for batch in table.select([*PLAN_COLUMNS, *extra]).to_batches(max_chunksize=4_096):
        columns = [digested_values(column) for column in batch.columns]
        if extra:
            more = zip(*columns[len(PLAN_COLUMNS) :], strict=True)
            columns = [*columns[: len(PLAN_COLUMNS)], [dict(zip(extra, values, strict=True)) for values in more]]
        yield encoder.encode_lines(zip(*columns, strict=True))


def digested_values(column: pa.Array) -> list[object]:
    """Return a column's values; floats are in hexadecimal, which every language writes alike."""
    values: list[object] = column.to_pylist()
    if not pa.types.is_floating(column.type):
        return values
    return [value.hex() if isinstance(value, float) else None for value in values]


def extra_columns(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name not in PLAN_SCHEMA.names]


def is_withdrawn(rows: pa.Table) -> NDArray[np.bool_]:
    """Return which rows of a plan are of withdrawn samples; the table must have their conversations."""
    mask: NDArray[np.bool_] = rows["conversations"].is_null().to_numpy()
    return mask


def without_samples(rows: pa.Table, withdrawn: NDArray[np.bool_]) -> pa.Table:
    """Withdraw rows of a plan: nothing but `KEPT_OF_WITHDRAWN` is left of them."""
    mask = pa.array(withdrawn)
    for place, name in enumerate(rows.column_names):
        if name not in KEPT_OF_WITHDRAWN:
            field = rows.schema.field(place)
            rows = rows.set_column(place, field, pc.if_else(mask, pa.scalar(None, field.type), rows[name]))
    return rows


def encode_plan(stream: BinaryIO, shards: Iterable[pa.Table], sizes: Iterable[str]) -> None:
    """Write a plan, one row group per table; `sizes` has the name of each one's array.

    All tables have the same columns; extra ones follow those of every plan. Texts have no statistics: the least and the
    greatest caption of each row group would make a large plan's footer larger than any reader takes.
    """
    each = iter(zip(shards, sizes, strict=False))
    first = [*islice(each, 1)]
    schema = first[0][0].schema if first else PLAN_SCHEMA
    # only these statistics are read, and those of texts would fill the footer
    with pq.ParquetWriter(stream, schema, compression="zstd", write_statistics=["size"]) as writer:
        for shard, size in chain(first, each):
            named = shard.set_column(SIZE, "size", pa.repeat(size, shard.num_rows))
            writer.write_table(named, row_group_size=shard.num_rows)


def refuse_other_columns(where: str, schema: pa.Schema) -> None:
    own, extra = list(schema)[: len(PLAN_SCHEMA)], list(schema)[len(PLAN_SCHEMA) :]
    are_simple = all(each.type in EXTRA_TYPES.values() for each in extra)
    if own != list(PLAN_SCHEMA) or not are_simple or extra_problem([each.name for each in extra]):
        raise CacheError(f"{where} does not have the columns of the format")


class PlanFile:
    """The plan file, read one shard at a time."""

    def __init__(self, file: TableFile) -> None:
        """Raise CacheError if the columns are not a plan's."""
        self._file = file
        refuse_other_columns(file.where, file.schema)
        self.extra = extra_columns(file.schema)
        """Names of the extra columns."""
        self.digested = [*PLAN_COLUMNS, *self.extra]
        """The columns that the digest covers."""

    @property
    def num_shards(self) -> int:
        return int(self._file.metadata.num_row_groups)

    @property
    def num_rows(self) -> int:
        return int(self._file.metadata.num_rows)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First row of each shard, then the number of rows: [shards + 1]."""
        lengths = [self._file.metadata.row_group(number).num_rows for number in range(self.num_shards)]
        return np.cumsum([0, *lengths])

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Name of each shard's array; CacheError if a row group does not state one."""
        groups = map(self._file.metadata.row_group, range(self.num_shards))
        stated = [group.column(self._size_column).statistics for group in groups]
        if any(each is None or not each.has_min_max or each.min != each.max for each in stated):
            raise CacheError(f"{self._file.where} does not state the size of each row group")
        return tuple(each.min for each in stated)

    @cached_property
    def _size_column(self) -> int:
        columns = self._file.metadata.schema
        return next(place for place in range(len(columns)) if columns.column(place).path == "size")

    def is_cut_as(self, spec: Spec) -> bool:
        """Return whether it is cut into the shards of a spec; only the digest compares rows."""
        return np.array_equal(self.bounds, spec.bounds) and self.sizes == tuple(
            spec.names[array] for array in spec.array_indices
        )

    def digests(self, num_shards: int | None = None) -> PlanDigests:
        """Compute the digests of the rows of the first shards, or of all.

        It reads every column of these rows, with one shard in memory at a time.
        """
        plan_hash = PlanHash()
        for shard in range(self.num_shards if num_shards is None else num_shards):
            plan_hash.add(self.shard(shard))
        return plan_hash.digests()

    def shard(self, shard: int, columns: list[str] | None = None) -> pa.Table:
        return self._file.row_group(shard, columns)

    def rows(self, first: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows [first, stop), which may lie in several row groups."""
        parts, names = list[pa.Table](), None if columns is None else list(columns)
        for shard in range(int(np.searchsorted(self.bounds, first, side="right")) - 1, self.num_shards):
            start = int(self.bounds[shard])
            if start >= stop:
                break
            parts.append(self.shard(shard, names).slice(max(first - start, 0), stop - max(first, start)))
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts).combine_chunks()

    def recorded_rows(self, content: CommitContent) -> pa.Table:
        """Read the rows that a shard was made for; CacheError if the plan has other samples there."""
        rows = self.shard(content.shard) if content.shard < self.num_shards else None
        if rows is None or plan_digest(rows) != content.plan_digest:
            raise CacheError(f"{self._file.where} and the record of shard {content.shard} disagree on the shard's rows")
        return rows
