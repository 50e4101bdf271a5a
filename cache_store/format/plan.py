"""The plan: which sample is in which row, and the texts of these samples; a file of each for a part of the rows.

A file has one row group per shard, so that a worker reads only its own.
"""

import base64
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache_store.errors import CacheError
from cache_store.format.array import TextRecipe
from cache_store.format.schema import CommitContent, Part, Spec, Texts
from cache_store.format.tables import (
    CLIP_START,
    EXTRA_TYPES,
    PLAN_SCHEMA,
    TEXTS_SCHEMA,
    WITHDRAWN,
    TableFile,
    extra_problem,
)

KEPT_OF_WITHDRAWN = ("id", "uri", CLIP_START, "state", "size")
"""Columns that a withdrawn sample keeps: they say what must not come back."""

DIGESTS_KEY = "encode_once.digests"
"""Key in the footer of a part: the digests of its samples and of each shard's, 32 bytes each, in base64."""

DIGEST_BYTES = 32

PAGES: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""How pages are written: a reader of one shard finds a flipped bit."""

PARTS_HELD = 16
"""Parts whose footers are in memory: some 12 KB for each of a part's shards."""

ROWS_AT_ONCE = 4_096
"""Rows that are Python objects at a time."""

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


def samples_digest(rows: pa.Table) -> str:
    """Hash the samples of planned rows as JSON lines (SHA-256), which does not depend on Parquet or its version.

    A line is `[id, uri]`, or of a clip `[id, uri, clip_start]`: neither how the rows are cut into shards, nor their
    texts, nor how their files lie on a disk.
    """
    digest = hashlib.sha256()
    for lines in sample_lines(rows):
        digest.update(lines)
    return digest.hexdigest()


def sample_lines(rows: pa.Table) -> Iterator[bytes]:
    encoder, columns = msgspec.json.Encoder(), rows.select(["id", "uri", CLIP_START])
    for batch in columns.to_batches(max_chunksize=ROWS_AT_ONCE):
        starts = batch.column(2)
        values = [batch.column(0).to_pylist(), batch.column(1).to_pylist(), digested_values(starts)]
        if starts.null_count == len(starts):
            yield encoder.encode_lines(zip(*values[:2], strict=True))
        else:
            lines = zip(*values, strict=True)
            yield encoder.encode_lines([line if line[2] is not None else line[:2] for line in lines])


def texts_digest(rows: pa.Table) -> str:
    """Hash the texts of planned rows (SHA-256): a JSON line `[id, conversations]`, or `[id, conversations, extra]`.

    `extra` is an object of the extra columns' names and values. Those of a withdrawn row are null.
    """
    digest, encoder, extra = hashlib.sha256(), msgspec.json.Encoder(order="sorted"), extra_columns(rows.schema)
    for batch in rows.select(["id", "conversations", *extra]).to_batches(max_chunksize=ROWS_AT_ONCE):
        columns = [digested_values(column) for column in batch.columns]
        if extra:
            more = zip(*columns[2:], strict=True)
            columns = [*columns[:2], [dict(zip(extra, values, strict=True)) for values in more]]
        digest.update(encoder.encode_lines(zip(*columns, strict=True)))
    return digest.hexdigest()


def encoded_texts_digest(recipe: TextRecipe, rows: pa.Table) -> str:
    """Hash the texts that a recipe encodes (SHA-256): a JSON line `[id, text]` a row, null where it has none."""
    pairs = zip(rows["id"].to_pylist(), rows["conversations"].to_pylist(), strict=True)
    lines = msgspec.json.Encoder().encode_lines([name, text_of(recipe, name, turns)] for name, turns in pairs)
    return hashlib.sha256(lines).hexdigest()


def digested_values(column: pa.Array) -> list[object]:
    """Return a column's values; floats are in hexadecimal, which every language writes alike."""
    values: list[object] = column.to_pylist()
    if not pa.types.is_floating(column.type):
        return values
    return [value.hex() if isinstance(value, float) else None for value in values]


def extra_columns(schema: pa.Schema) -> list[str]:
    own = {"row", *PLAN_SCHEMA.names, *TEXTS_SCHEMA.names}
    return [name for name in schema.names if name not in own]


def is_withdrawn(rows: pa.Table) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = pc.fill_null(pc.equal(rows["state"], WITHDRAWN), False).to_numpy()
    return mask


def without_samples(rows: pa.Table, withdrawn: NDArray[np.bool_]) -> pa.Table:
    """Withdraw rows of a plan or of texts: nothing but `KEPT_OF_WITHDRAWN` is left of them."""
    mask = pa.array(withdrawn)
    for place, name in enumerate(rows.column_names):
        field = rows.schema.field(place)
        value = WITHDRAWN if name == "state" else None
        if name == "state" or name not in KEPT_OF_WITHDRAWN:
            rows = rows.set_column(place, field, pc.if_else(mask, pa.scalar(value, field.type), rows[name]))
    return rows


def is_cut_as(spec: Spec, part: int, lengths: Sequence[int], sizes: Sequence[str]) -> bool:
    shards = spec.part_shards[part]
    names = [spec.names[array] for array in spec.array_indices[shards.start : shards.stop]]
    return ([*lengths], [*sizes]) == ([len(spec.shard_rows(shard)) for shard in shards], names)


class PartDigests(NamedTuple):
    """What a part is; for each of its shards, the digest of its samples and how many of them are withdrawn."""

    part: Part
    shards: tuple[str, ...]
    withdrawn: tuple[int, ...]


class PartHash:
    """Computes the digests of a part whose rows are added shard by shard."""

    def __init__(self) -> None:
        self._shards, self._withdrawn, self._whole, self._rows = list[str](), list[int](), hashlib.sha256(), 0

    def add(self, rows: pa.Table) -> None:
        """Add the rows of the next shard."""
        digest = hashlib.sha256()
        for lines in sample_lines(rows):
            digest.update(lines)
            self._whole.update(lines)
        self._shards.append(digest.hexdigest())
        self._withdrawn.append(int(is_withdrawn(rows).sum()))
        self._rows += rows.num_rows

    def digests(self) -> PartDigests:
        part = Part(rows=self._rows, shards=len(self._shards), digest=self._whole.hexdigest())
        return PartDigests(part, tuple(self._shards), tuple(self._withdrawn))


def write_part(stream: BinaryIO, shards: Iterable[tuple[pa.Table, str]]) -> PartDigests:
    """Write the samples of a part, one row group per shard, each with the name of its array."""
    part_hash = PartHash()
    # only these statistics are read; those of texts would make a footer several times as large
    with pq.ParquetWriter(stream, PLAN_SCHEMA, **PAGES, write_statistics=["size", "state"]) as writer:
        for shard, size in shards:
            sizes = pa.repeat(size, shard.num_rows)
            named = shard.select(PLAN_SCHEMA.names[:-1]).append_column(PLAN_SCHEMA.field("size"), sizes)
            writer.write_table(named, row_group_size=shard.num_rows)
            part_hash.add(shard)
        digests = part_hash.digests()
        data = b"".join(map(bytes.fromhex, (digests.part.digest, *digests.shards)))
        writer.add_key_value_metadata({DIGESTS_KEY: base64.b64encode(data).decode()})
    return digests


def write_texts(stream: BinaryIO, shards: Sequence[pa.Table]) -> None:
    """Write the texts of a part, one row group per shard; all tables have the same columns."""
    extra = shards[0].select(extra_columns(shards[0].schema)).schema
    types = (
        next(each for each in EXTRA_TYPES.values() if each == field.type) for field in extra
    )  # as lists name items
    schema = pa.schema([*TEXTS_SCHEMA, *(pa.field(*each) for each in zip(extra.names, types, strict=True))])
    with pq.ParquetWriter(stream, schema, **PAGES, write_statistics=False) as writer:
        for shard in shards:
            writer.write_table(shard.select(schema.names).cast(schema), row_group_size=shard.num_rows)


def refuse_other_texts(file: TableFile) -> None:
    own, extra = list(file.schema)[: len(TEXTS_SCHEMA)], list(file.schema)[len(TEXTS_SCHEMA) :]
    are_simple = all(each.type in EXTRA_TYPES.values() for each in extra)
    if own != list(TEXTS_SCHEMA) or not are_simple or extra_problem([each.name for each in extra]):
        raise CacheError(f"{file.where} does not have the columns of the format")


class PlanPart:
    """The samples of a part, read one shard at a time."""

    def __init__(self, file: TableFile) -> None:
        self._file, self.where = file, file.where
        if list(file.schema) != list(PLAN_SCHEMA):
            raise CacheError(f"{file.where} does not have the columns of the format")

    @property
    def num_shards(self) -> int:
        return int(self._file.metadata.num_row_groups)

    @property
    def lengths(self) -> list[int]:
        return [self._file.metadata.row_group(number).num_rows for number in range(self.num_shards)]

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Name of each shard's array; CacheError if a row group does not state one."""
        ranges = self._ranges("size")
        if any(least != most for least, most in ranges):
            raise CacheError(f"{self.where} does not state the size of each row group")
        return tuple(least for least, _ in ranges)

    @cached_property
    def withdrawn(self) -> tuple[int, ...]:
        has_some = [most == WITHDRAWN for _, most in self._ranges("state")]
        return tuple(
            int(is_withdrawn(self.shard(shard, ["state"])).sum()) if each else 0 for shard, each in enumerate(has_some)
        )

    def _ranges(self, name: str) -> list[tuple[str, str]]:
        stated = [self._file.column(group, name).statistics for group in range(self.num_shards)]
        if any(each is None or not each.has_min_max for each in stated):
            raise CacheError(f"{self.where} does not state the {name} of each row group")
        return [(each.min, each.max) for each in stated]

    def shard(self, shard: int, columns: list[str] | None = None) -> pa.Table:
        return self._file.row_group(shard, columns)

    def whole(self, columns: list[str] | None = None) -> pa.Table:
        return self._file.whole(columns)

    def computed_digests(self) -> PartDigests:
        """Compute the digests from every row, with one shard in memory at a time, whose bytes are all checked."""
        part_hash = PartHash()
        for shard in range(self.num_shards):
            part_hash.add(self.shard(shard))
        return part_hash.digests()

    @property
    def stated(self) -> Part:
        digest = self._stated_data[:DIGEST_BYTES].hex()
        return Part(rows=sum(self.lengths), shards=self.num_shards, digest=digest)

    @property
    def stated_digests(self) -> PartDigests:
        data = self._stated_data
        shards = (data[first : first + DIGEST_BYTES].hex() for first in range(DIGEST_BYTES, len(data), DIGEST_BYTES))
        return PartDigests(self.stated, tuple(shards), self.withdrawn)

    @property
    def _stated_data(self) -> bytes:
        text = (self._file.metadata.metadata or {}).get(DIGESTS_KEY.encode(), b"")
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError:
            data = b""
        if len(data) != (1 + self.num_shards) * DIGEST_BYTES:
            raise CacheError(f"{self.where} does not state the digests of its shards")
        return data


class Plan:
    """The plan of a cache and its texts in force, read one shard at a time; parts are opened when they are needed."""

    def __init__(
        self,
        shards: Sequence[int],
        open_part: Callable[[int], PlanPart],
        open_texts: Callable[[int], TableFile],
        in_force: Callable[[], Texts],
    ) -> None:
        """`shards` has the number of shards of each part; the functions open a part, its texts, and texts.json."""
        self.parts, self._first = len(shards), [0, *accumulate(shards)]
        self.part = lru_cache(PARTS_HELD)(open_part)
        """Open the samples of a part."""
        self._texts, self._in_force = lru_cache(PARTS_HELD)(open_texts), in_force

    @property
    def num_shards(self) -> int:
        return self._first[-1]

    @property
    def extra(self) -> list[str]:
        return [*self.texts.extra]

    @property
    def texts(self) -> Texts:
        """Which texts are read: those that were in force when the first were asked for."""
        return self._in_force()

    def shard(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read columns of a shard's samples and texts, by default all; an extra column that this part lacks is null."""
        number = bisect_right(self._first, shard) - 1
        group, part = shard - self._first[number], self.part(number)
        wanted = [*PLAN_SCHEMA.names, *self.text_columns(number)] if columns is None else [*columns]
        own = [name for name in PLAN_SCHEMA.names if name in wanted]
        rows = part.shard(group, own or ["id"])
        if others := [name for name in wanted if name not in own]:
            file = self._texts(number)
            there = [name for name in others if name in file.schema.names]
            texts = file.row_group(group, there or TEXTS_SCHEMA.names) if group < file.metadata.num_row_groups else None
            if texts is None or texts.num_rows != rows.num_rows:
                raise CacheError(f"{file.where} does not have the rows of shard {shard} of the plan")
            for name in others:
                rows = rows.append_column(name, texts[name] if name in there else pa.nulls(rows.num_rows))
        return rows.select(wanted)

    def text_columns(self, part: int) -> list[str]:
        return list(self._texts(part).schema.names)

    def part_rows(self, part: int, columns: Sequence[str] | None = None) -> pa.Table:
        shards = range(self._first[part], self._first[part + 1])
        return pa.concat_tables([self.shard(shard, columns) for shard in shards])

    def recorded_rows(self, content: CommitContent, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows that a shard was made for; CacheError if the plan has other samples there."""
        is_there = content.shard < self.num_shards
        if not is_there or samples_digest(self.shard(content.shard, ["id", "uri", CLIP_START])) != content.samples:
            raise CacheError(f"the plan and the record of shard {content.shard} disagree on the shard's rows")
        return self.shard(content.shard, columns)
