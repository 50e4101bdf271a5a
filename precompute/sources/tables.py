"""Tables of listed samples, which become parts of a plan."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.tables import EXTRA_TYPES, NO_VALUES, PLAN_SCHEMA, PLANNED, TEXTS_SCHEMA
from cache_store.messages import abridge, counted

LISTED = pa.schema([*(each for each in PLAN_SCHEMA if each.name != "size"), *TEXTS_SCHEMA])
"""The columns of listed samples; extra columns follow."""

CHUNK = 8_192
"""Samples held as Python objects at a time."""

MOST_TEXT = 2**31 - 1
"""Most characters of a part's texts: those of one column of a table. A caption takes some hundred bytes."""


def make_table(samples: Iterable[Mapping[str, Any]], extra: Sequence[str], where: str) -> pa.Table:
    """Make one table of all samples, with the `extra` fields as columns.

    Raises SourceError for a value that no plan can hold, and for too much text.
    """
    tables, held, rest = list[pa.Table](), 0, iter(samples)
    while (chunk := [*islice(rest, CHUNK)]) or not tables:
        table = pa.Table.from_pylist(chunk, LISTED)
        for name in extra:
            table = with_column(table, name, extra_values(chunk, name, where))
        held += table["conversations"].nbytes
        if held > MOST_TEXT:
            raise SourceError(
                f"{where}: the texts of a part of the plan take more than {MOST_TEXT:,} bytes, up to sample "
                f"{abridge([chunk[-1]['id']])}; cut the texts, or set a smaller store.rows_per_part"
            )
        tables.append(table)
    table = joined(tables)
    return with_column(table, "state", pc.fill_null(table["state"], PLANNED))


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, values)
    place = table.column_names.index(name)
    return table.set_column(place, table.schema.field(place), values.cast(table.schema.field(place).type))


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise SourceError(f"source.fields.extra: the values of a column must be of one kind: {error}") from None


def recut(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield tables of so many rows each, and a shorter last one."""
    held = list[pa.Table]()
    for table in tables:
        held.append(table)
        while sum(map(len, held)) >= rows:
            whole = held[0] if len(held) == 1 else joined(held)
            yield whole.slice(0, rows)
            held = [whole.slice(rows)] * (len(whole) > rows)
    if held:
        yield joined(held)


def extra_values(samples: Sequence[Mapping[str, Any]], name: str, where: str) -> pa.Array:
    """Return a field of some samples; a number that is not finite counts as absent."""
    values = [sample["extra"].get(name) for sample in samples]
    values = [None if isinstance(each, float) and not math.isfinite(each) else each for each in values]
    with suppress(pa.ArrowException, OverflowError):
        array = pa.array(values)
        if array.type == pa.list_(pa.null()):
            array = array.cast(pa.list_(pa.string()))
        if array.type in EXTRA_TYPES.values():
            return array
    pairs = [
        (type(value).__name__, sample["id"]) for sample, value in zip(samples, values, strict=True) if value is not None
    ]
    firsts = dict(reversed(pairs))
    found = " and ".join(f"{kind} (sample {abridge([firsts[kind]])})" for kind in sorted(firsts))
    kinds = ", ".join(kind for kind in EXTRA_TYPES if kind != NO_VALUES)
    raise SourceError(f"{where}: source.fields.extra: {name} is {found}; its values must be of one kind: {kinds}")


def refuse_duplicates(tables: Callable[[], Iterable[pa.Table]], where: str) -> None:
    """Raise SourceError naming ids that these tables have more than once, and two images of the first."""
    hashes = [np.fromiter(map(hash, table["id"].to_pylist()), np.int64) for table in tables()]
    ordered = np.sort(np.concatenate(hashes))
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    uris = dict[str, list[str]]()
    for table, each in zip(tables(), hashes, strict=True) if len(repeated) else ():
        for sample in table.filter(pa.array(np.isin(each, repeated))).to_pylist():
            uris.setdefault(sample["id"], []).append(sample["uri"] or "none")
    if names := sorted(name for name, images in uris.items() if len(images) > 1):
        raise SourceError(
            f"{where}: {counted(len(names), 'sample id')} came more than once: {abridge(names)} (first with "
            f"the images {abridge(uris[names[0]][:2])}); give each sample an id of its own, or leave out all but one"
        )
