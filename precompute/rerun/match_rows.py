"""Compare two lists of samples, and put one into the rows of the other: known samples keep their rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.format.plan import Plan, ShardedRows, is_withdrawn
from cache_store.format.tables import CLIP_START, PLAN_SCHEMA
from precompute.rerun.rows import (
    NO_IDS,
    Hashes,
    ListedRows,
    Rows,
    SomeIds,
    hashes_of,
    id_hashes,
    ids_where,
    rows_in_scratch,
    slices_of,
)

Places = NDArray[np.int64]

ROWS_HELD = 2**18
"""Rows reorder at a time, about 200 MB; if the list's order is very different, each time reads the whole list."""


@dataclass(frozen=True)
class PlanDifference:
    """How the source's samples differ from the cache's plan, by id."""

    added: SomeIds = NO_IDS
    removed: SomeIds = NO_IDS
    changed: SomeIds = NO_IDS

    def __str__(self) -> str:
        parts = [
            (self.added, "new"),
            (self.removed, "gone"),
            (self.changed, "with another image name"),
        ]
        return "; ".join(f"{ids.total:,} {what} ({ids})" for ids, what in parts if ids.total)


NO_DIFFERENCE = PlanDifference()


def compare_plans(planned: Rows, found: ListedRows) -> PlanDifference:
    """Compare two plans by hashes of ids and of the other columns, in 24 bytes of memory per sample.

    A sample that another cache, as the source, has withdrawn counts as removed.
    """
    before, now = planned.id_hashes(), id_hashes(found.shards(["id"]))
    places, is_there = places_of(now, before)
    differs = content_hashes(planned) != content_hashes(found)[places]
    is_new = np.ones(len(now), bool)
    is_new[places[is_there]] = False
    is_gone = ~is_there | (withdrawn_rows(found)[places] & ~withdrawn_rows(planned))
    return PlanDifference(
        added=ids_where(found, found.bounds, is_new),
        removed=ids_where(planned, planned.cut.bounds, is_gone),
        changed=ids_where(planned, planned.cut.bounds, differs & ~is_gone),
    )


def withdrawn_rows(rows: Rows | ListedRows) -> NDArray[np.bool_]:
    return np.concatenate([np.empty(0, bool), *map(is_withdrawn, rows.shards(["state"]))])


def content_hashes(rows: Rows | ListedRows) -> Hashes:
    """Hash every row's uri and where its clip begins."""
    tables = rows.shards(["uri", CLIP_START])
    return np.concatenate([np.empty(0, np.int64), *(hashes_of(map(repr, table.to_pylist())) for table in tables)])


def with_withdrawn(found: ListedRows, plan: Plan) -> ListedRows:
    """Replace the withdrawn samples of a plan in a source's list, which may lack them, by their rows of the plan.

    These come last.
    """
    shards = [shard for part in range(plan.parts) for shard in plan.withdrawn_shards(part)]
    if not shards:
        return found
    rows = pa.concat_tables([plan.shard(shard, PLAN_SCHEMA.names) for shard in shards])
    withdrawn = rows.filter(pa.array(is_withdrawn(rows)))
    ids = withdrawn["id"].combine_chunks()

    def tables() -> Iterator[pa.Table]:
        for table in found.shards():
            left = table.filter(pc.invert(pc.is_in(table["id"], ids)))
            if left.num_rows:
                yield left
        texts = {name: pa.nulls(len(ids), table.schema.field(name).type) for name in table.column_names}
        yield pa.table({**texts, **{name: withdrawn[name] for name in PLAN_SCHEMA.names}}, schema=table.schema)

    return rows_in_scratch(tables(), found.parts)


def reorder_by_ids(found: ListedRows, ids: Hashes, samples_per_shard: int, rows_held: int = ROWS_HELD) -> ListedRows:
    """Reorder `found`: first the samples that `ids` name, in that order, then the others, in their own order."""
    order = order_of(id_hashes(found.shards(["id"])), ids)
    if len(order) == len(found) and (order[1:] > order[:-1]).all():
        return found
    return rows_in_scratch(reorder(found, order, samples_per_shard, rows_held), found.parts)


def order_of(found: Hashes, wanted: Hashes) -> Places:
    """Return places in `found`: first of those `wanted` that are there, then of all others."""
    places, is_there = places_of(found, wanted)
    known = places[is_there]
    is_new = np.ones(len(found), bool)
    is_new[known] = False
    return np.concatenate([known, np.flatnonzero(is_new)])


def places_of(found: Hashes, wanted: Hashes) -> tuple[Places, NDArray[np.bool_]]:
    """Return, for each of `wanted`, its place in `found`, and whether it is there."""
    if not len(found):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    by_hash = np.argsort(found, kind="stable")
    at = np.minimum(np.searchsorted(found, wanted, sorter=by_hash), len(found) - 1)
    places: Places = by_hash[at]
    return places, found[places] == wanted


def reorder(found: ShardedRows, order: Places, samples_per_shard: int, rows_held: int) -> Iterator[pa.Table]:
    """Yield shards of the rows of `found` at the places in `order`."""
    block = max(1, rows_held // samples_per_shard) * samples_per_shard
    for first in range(0, len(order), block):
        rows = read_rows(found, order[first : first + block])
        yield from (each.combine_chunks() for each in slices_of(rows, samples_per_shard))


def read_rows(found: ShardedRows, places: Places) -> pa.Table:
    """Read the rows at these places, each row group only once."""
    in_order = np.argsort(places, kind="stable")
    rising = places[in_order]
    pages, starts = np.unique(np.searchsorted(found.bounds, rising, side="right") - 1, return_index=True)
    parts = [
        found.shard(page).take(rising[start:stop] - int(found.bounds[page]))
        for page, start, stop in zip(pages.tolist(), starts, [*starts[1:], len(rising)], strict=True)
    ]
    back = np.empty(len(places), np.int64)
    back[in_order] = np.arange(len(places))
    return pa.concat_tables(parts).combine_chunks().take(back)
