"""Making the plan from a source's samples, and saying how a later sample list differs from it.

A new cache's rows are sorted by id, or are in the source's own order: that of another cache, of tars, of Parquet files.
An extension keeps every row and appends its samples, again in that order, so a later sample list is always brought into
the cache's own order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.tables import PLAN_SCHEMA
from precompute.sources import SourceConfig
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.listing import Samples

CHUNK = 65_536
"""Samples held as Python objects at a time; the plan itself is columns."""

SHOWN_IDS = 5
"""Ids named in a message before it says how many more there are."""


def make_plan(samples: Samples) -> pa.Table:
    """Samples as a plan, sorted by id where they are in no rows yet; duplicate ids are a SourceError."""
    schema = pa.schema([field for field in PLAN_SCHEMA if field.name != "row"])
    rows = iter(samples)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    batches = [pa.RecordBatch.from_pylist(chunk, schema=schema) for chunk in chunks]
    table = pa.Table.from_batches(batches, schema=schema)
    table = (table if samples.in_rows else table.sort_by("id")).combine_chunks()
    if table.num_rows == 0:
        raise SourceError("; ".join(filter(None, ["the source holds no samples", samples.passed_over])))
    refuse_duplicates(table["id"].sort() if samples.in_rows else table["id"])
    return numbered(table)


def numbered(table: pa.Table) -> pa.Table:
    """The table with its rows counted from 0, in the plan's schema."""
    return table.add_column(0, PLAN_SCHEMA.field("row"), pa.array(range(table.num_rows), pa.int64()))


def in_order_of(found: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """The samples of `found`: first those that `ids` name, in that order, then the others, in their own."""
    known = pc.index_in(ids, value_set=found["id"]).combine_chunks().drop_null()
    new = pc.indices_nonzero(pc.invert(pc.is_in(found["id"], value_set=ids)))
    order = pa.concat_arrays([known.cast(pa.uint64()), new])
    return numbered(found.drop_columns("row").take(order).combine_chunks())


def refuse_duplicates(ids: pa.ChunkedArray) -> None:
    """`ids` is sorted, so duplicates are neighbours."""
    repeated = pc.equal(ids[1:], ids[:-1])
    if pc.any(repeated).as_py():
        names = sorted(set(ids[1:].filter(repeated).to_pylist()))
        raise SourceError(f"sample ids must be unique; {len(names)} occur more than once: {abridged(names)}")


def refuse_missing_images(found: pa.Table, source: SourceConfig, allowed: float) -> None:
    """Known before anything is encoded: a wrong folder should not cost an hour."""
    missing = found.filter(pc.equal(found["fingerprint"], MISSING))
    if missing.num_rows > allowed * found.num_rows:
        reasons, advice = zip(*why_missing(missing, source), strict=True)
        raise SourceError(
            f"{missing.num_rows} of {found.num_rows} samples have no image: {'; '.join(reasons)}. That is more "
            f"than run.max_reject_fraction {allowed:g} allows; nothing was encoded. {'. '.join(advice)}"
        )


def why_missing(missing: pa.Table, source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Each reason that there is for images to be missing, and what to do about it."""
    is_unnamed = pc.equal(missing["uri"], "")
    unnamed, named = missing.filter(is_unnamed)["id"], missing.filter(pc.invert(is_unnamed))["uri"]
    if len(named):
        where = source.images or (Path(source.path).parent if source.kind == "llava" else source.path)
        mend = "Set source.images, or mend it" if source.kind == "llava" else f"Mend {where}"
        yield f"{abridged(named.to_pylist())}; looked in {where}", mend
    if len(unnamed):
        yield (
            f"the records of {len(unnamed)} samples name none: {abridged(unnamed.to_pylist())}",
            f"Give these records an `image`, or leave them out of {source.path}",
        )


def abridged(names: Sequence[str]) -> str:
    shown = [name if name.isprintable() else ascii(name) for name in names[:SHOWN_IDS]]  # one line, whatever they hold
    more = f" and {len(names) - SHOWN_IDS} more" if len(names) > SHOWN_IDS else ""
    return ", ".join(shown) + more


@dataclass(frozen=True)
class PlanDifference:
    """How the source's samples differ from the cache's plan, by id."""

    added: list[str]
    removed: list[str]
    changed: list[str]

    def __str__(self) -> str:
        parts = [(self.added, "new"), (self.removed, "gone"), (self.changed, "with another image name or text")]
        return "; ".join(f"{len(ids):,} {what} ({abridged(ids)})" for ids, what in parts if ids)


def compare_plans(planned: pa.Table, found: pa.Table) -> PlanDifference:
    tables = (table.select(["id", "uri", "conversations"]).to_pylist() for table in (planned, found))
    before, now = ({row["id"]: row for row in rows} for rows in tables)
    return PlanDifference(
        added=sorted(now.keys() - before.keys()),
        removed=sorted(before.keys() - now.keys()),
        changed=sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    )
