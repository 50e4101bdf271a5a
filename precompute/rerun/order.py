"""Bringing samples into the rows of a cache: those that it has, where they are, and the others behind them."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.plan import PlanFile
from precompute.rerun.ids import Hashes
from precompute.rerun.rows import Rows, numbered, rows_in_scratch, slices_of

Places = NDArray[np.int64]

ROWS_HELD = 2**18
"""Rows put in order at a time, about 200 MB: of a list in quite another order, all of it is read for each of them."""


def in_order_of(found: Rows, ids: Hashes) -> Rows:
    """The samples of `found`: first those that `ids` name, in that order, then the others, in their own."""
    order = order_of(found.id_hashes(), ids)
    if len(order) == len(found) and (order[1:] > order[:-1]).all():
        return found
    size = found.samples_per_shard
    return rows_in_scratch(numbered(reordered(found.plan, size, order, size, ROWS_HELD)), size)


def order_of(found: Hashes, wanted: Hashes) -> Places:
    """Places in `found`: of `wanted`, as far as they are there, then all others."""
    places, is_there = places_of(found, wanted)
    known = places[is_there]
    is_new = np.ones(len(found), bool)
    is_new[known] = False
    return np.concatenate([known, np.flatnonzero(is_new)])


def places_of(found: Hashes, wanted: Hashes) -> tuple[Places, NDArray[np.bool_]]:
    """For each of `wanted`, where in `found` it is, and whether it is there at all."""
    if not len(found):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    by_hash = np.argsort(found, kind="stable")
    at = np.minimum(np.searchsorted(found, wanted, sorter=by_hash), len(found) - 1)
    places: Places = by_hash[at]
    return places, found[places] == wanted


def reordered(
    found: PlanFile, page_rows: int, order: Places, samples_per_shard: int, rows_held: int
) -> Iterator[pa.Table]:
    """Shards of the rows that `found`, in pages of so many, has at the places that `order` gives."""
    block = max(1, rows_held // samples_per_shard) * samples_per_shard
    for first in range(0, len(order), block):
        rows = taken(found, page_rows, order[first : first + block])
        yield from (each.combine_chunks() for each in slices_of(rows, samples_per_shard))


def taken(found: PlanFile, page_rows: int, places: Places) -> pa.Table:
    """The rows at these places, each page of them read once."""
    in_order = np.argsort(places, kind="stable")
    rising = places[in_order]
    pages, starts = np.unique(rising // page_rows, return_index=True)
    parts = [
        found.shard(page).take(rising[start:stop] - page * page_rows)
        for page, start, stop in zip(pages.tolist(), starts, [*starts[1:], len(rising)], strict=True)
    ]
    back = np.empty(len(places), np.int64)
    back[in_order] = np.arange(len(places))
    return pa.concat_tables(parts).combine_chunks().take(back)
