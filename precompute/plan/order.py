"""Bringing samples into the rows of a cache: those that it has, where they are, and the others behind them."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.tables import PLAN_SCHEMA
from precompute.plan.ids import Hashes
from precompute.plan.rows import Rows, rows_in_scratch

ROWS_HELD = 2**18
"""Rows put in order at a time, about 200 MB: of a list in quite another order, all of it is read for each of them."""


def in_order_of(found: Rows, ids: Hashes) -> Rows:
    """The samples of `found`: first those that `ids` name, in that order, then the others, in their own."""
    order = order_of(found.id_hashes(), ids)
    if len(order) == len(found) and (order[1:] > order[:-1]).all():
        return found
    return rows_in_scratch(reordered(found, order), found.samples_per_shard)


def order_of(found: Hashes, wanted: Hashes) -> NDArray[np.int64]:
    """Places in `found`: of `wanted`, as far as they are there, then all others."""
    places, is_there = places_of(found, wanted)
    known = places[is_there]
    is_new = np.ones(len(found), bool)
    is_new[known] = False
    return np.concatenate([known, np.flatnonzero(is_new)])


def places_of(found: Hashes, wanted: Hashes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each of `wanted`, where in `found` it is, and whether it is there at all."""
    if not len(found):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    by_hash = np.argsort(found, kind="stable")
    at = np.minimum(np.searchsorted(found, wanted, sorter=by_hash), len(found) - 1)
    places: NDArray[np.int64] = by_hash[at]
    return places, found[places] == wanted


def reordered(found: Rows, order: NDArray[np.int64]) -> Iterator[pa.Table]:
    """Shards of the rows of `found` at the places that `order` gives."""
    size = found.samples_per_shard
    block = max(1, ROWS_HELD // size) * size
    for first in range(0, len(order), block):
        rows = taken(found, order[first : first + block])
        row = pa.array(np.arange(first, first + rows.num_rows))
        rows = rows.set_column(0, PLAN_SCHEMA.field("row"), row)
        yield from (rows.slice(start, size).combine_chunks() for start in range(0, rows.num_rows, size))


def taken(found: Rows, places: NDArray[np.int64]) -> pa.Table:
    """The rows at these places, each shard of them read once."""
    in_order = np.argsort(places, kind="stable")
    rising = places[in_order]
    shards, starts = np.unique(rising // found.samples_per_shard, return_index=True)
    parts = [
        found.shard(shard).take(rising[start:stop] - shard * found.samples_per_shard)
        for shard, start, stop in zip(shards.tolist(), starts, [*starts[1:], len(rising)], strict=True)
    ]
    back = np.empty(len(places), np.int64)
    back[in_order] = np.arange(len(places))
    return pa.concat_tables(parts).combine_chunks().take(back)
