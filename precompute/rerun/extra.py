"""Extra columns of a plan: fields that a source's samples have beside their texts.

A column's type is the one that all its values share, so it is known only when every sample was listed. Until then, the
fields stand in the list as JSON, in one column of text; a second pass over the list makes the columns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from cache_store.errors import SourceError
from cache_store.format.tables import EXTRA_TYPES
from cache_store.messages import abridge
from precompute.rerun.rows import EXTRA, LISTED, ListedRows, as_planned, rows_in_scratch

WHOLE, REAL = "a whole number", "a number"


def kind_of(value: object) -> str | None:
    """Return the key in EXTRA_TYPES of a value, or None if a plan cannot hold it."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, float):
        return REAL
    if isinstance(value, int):
        return WHOLE if -(2**63) <= value < 2**63 else None
    is_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return "a list of texts" if is_texts else None


class ExtraColumns:
    """The extra columns of one listing."""

    def __init__(self, names: Sequence[str], source: str) -> None:
        self._source = source
        self._kinds: dict[str, dict[str, str]] = {name: {} for name in names}
        """For each column, the kinds of its values, each with the first sample that has it."""

    @property
    def listed(self) -> pa.Schema:
        """Columns of the list before the types are known."""
        return LISTED.append(EXTRA) if self._kinds else LISTED

    def as_text(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the samples with their extra fields as JSON; raise SourceError for a value that a plan cannot hold.

        A number that is not finite counts as absent.
        """
        if not self._kinds:
            yield from samples
            return
        for sample in samples:
            fields = {name: self._checked(sample["id"], name, value) for name, value in sample["extra"].items()}
            yield {**sample, EXTRA.name: msgspec.json.encode(fields).decode()}

    def _checked(self, sample: str, name: str, value: object) -> object:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if (kind := kind_of(value)) is None:
            wanted = "one in [-2^63, 2^63)" if isinstance(value, int) else f"{', '.join(EXTRA_TYPES)}, or null"
            raise SourceError(
                f"{self._source}: source.fields.extra: {name} of sample {abridge([sample])} is {type(value).__name__} "
                f"{abridge([repr(value)[:40]])}; expected {wanted}"
            )
        self._kinds[name].setdefault(kind, sample)
        return value

    def typed(self, listed: ListedRows) -> ListedRows:
        """Make the columns of a list in which the fields are JSON, and those of a plan."""
        fields = [pa.field(name, EXTRA_TYPES[self._kind(name)]) for name in self._kinds]
        tables = (with_columns(table, fields) if fields else table for table in listed.shards())
        return rows_in_scratch(as_planned(tables), listed.parts)

    def _kind(self, name: str) -> str:
        """Return the kind that all values of a column share; whole numbers are numbers too."""
        kinds = self._kinds[name]
        if not kinds:
            raise SourceError(
                f"{self._source}: source.fields.extra: no sample has {name}; correct its name, or leave it out"
            )
        if set(kinds) == {WHOLE, REAL}:
            return REAL
        if len(kinds) > 1:
            found = " and ".join(f"{kind} (sample {abridge([sample])})" for kind, sample in kinds.items())
            raise SourceError(f"{self._source}: source.fields.extra: {name} is {found}; its values must be of one kind")
        return next(iter(kinds))


def with_columns(table: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Make columns of the column of JSON."""
    rows = [msgspec.json.decode(text) for text in table[EXTRA.name].to_pylist()]
    table = table.drop_columns([EXTRA.name])
    for field in fields:
        values = [row[field.name] for row in rows]
        if pa.types.is_floating(field.type):
            values = [None if value is None else float(value) for value in values]
        table = table.append_column(field, pa.array(values, field.type))
    return table
