"""Find the planned samples in a source's list, by id: known samples keep their rows."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.format.plan import is_withdrawn, without_samples
from cache_store.format.tables import CLIP_START
from cache_store.messages import SHOWN_NAMES, abridge
from precompute.sources.tables import LISTED, joined, with_column

NEW, GONE, RENAMED = "new", "gone", "with another image name"
"""How samples of a source differ from those of a plan."""


class SomeIds(NamedTuple):
    """The number of samples in a group, and the first of their ids."""

    total: int = 0
    first: Sequence[str] = ()

    def with_more(self, ids: pa.ChunkedArray) -> "SomeIds":
        return SomeIds(self.total + len(ids), nsmallest(SHOWN_NAMES, [*self.first, *ids.to_pylist()]))

    def __str__(self) -> str:
        return abridge(self.first, self.total)


class Found(NamedTuple):
    """A part of the plan as the source lists it: the part's rows, with the columns of a list."""

    part: int
    rows: pa.Table
    """A withdrawn sample keeps its planned row; a sample that the source lacks is null."""
    planned: pa.Table | None
    """The part as it was planned; None if it was lost."""
    lacks: NDArray[np.bool_]
    """Which samples the source lacks; no withdrawn one."""
    differs: NDArray[np.bool_]
    """Which have another image name, or begin elsewhere in their video."""


Matched = tuple[Found | None, pa.Table]
"""A part as a table has it, None if the table does not; and the other rows of the table."""


class Matcher:
    """Puts the tables of a list into the rows of a plan's parts."""

    def __init__(
        self, parts: Sequence[int], match: Callable[[int, pa.Table], Matched], lost: Container[int] = ()
    ) -> None:
        """`match` finds a part in a table; of those that are `lost`, it finds one that is all of the table."""
        self._parts, self._match, self._lost = parts, match, lost
        self.rest: list[pa.Table] = []
        """Once all parts were found: the samples in the tables of parts that no part has."""
        self.behind: Iterator[pa.Table] = iter(())
        """Likewise: the tables behind those of parts."""
        self.missing: list[int] = []
        """Likewise: lost parts that the list does not have."""
        self.is_in_place = True
        """Likewise: whether each part was found in the table of its number, and is all of it."""

    def find(self, listed: Iterable[pa.Table]) -> Iterator[Found]:
        """Yield the parts, first those that are whole in the table of their number, then the others.

        Where all parts are of the first kind, tables behind them are listed only when `behind` is read. Else, what no
        part took from its table is in memory.
        """
        self.behind, left, rest = iter(listed), list[int](), list[pa.Table]()
        for number in self._parts:
            table = next(self.behind, LISTED.empty_table())
            found, others = self._match(number, table)
            if found and not found.lacks.any():
                yield found
                rest.append(others)
            else:
                left.append(number)
                rest.append(table)
        if left:
            rest = [joined([*rest, *self.behind])]
        for number in sorted(left, key=self._lost.__contains__):  # the lost last
            found, rest[0] = self._match(number, rest[0])
            if found:
                yield found
            else:
                self.missing.append(number)
        self.rest = [each for each in rest if each.num_rows]
        self.is_in_place = not left and not self.rest


def match(part: int, planned: pa.Table, listed: pa.Table) -> Matched:
    """Find the samples of a part in a table of a list; return them, and the other rows of the table.

    A sample that the source, another cache, has withdrawn counts as missing.
    """
    is_gone, names = is_withdrawn(planned), ["id", "uri", CLIP_START]
    places = pc.index_in(planned["id"].combine_chunks(), value_set=listed["id"].combine_chunks())
    is_other = np.ones(listed.num_rows, bool)
    is_other[places.drop_null().to_numpy()] = False
    rows = listed if planned["id"].equals(listed["id"]) else listed.take(places)
    lacks = (places.is_null().to_numpy(zero_copy_only=False) | is_withdrawn(rows)) & ~is_gone
    if is_gone.any():
        for name in names:
            rows = with_column(rows, name, pc.if_else(pa.array(is_gone), planned[name], rows[name]))
        rows = without_samples(rows, is_gone)
    equal = [equal_values(planned[name], rows[name]) for name in names]
    differs = ~np.logical_and.reduce(equal) & ~lacks
    return Found(part, rows, planned, lacks, differs), listed.filter(pa.array(is_other))


def equal_values(before: pa.ChunkedArray, now: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which values are equal; two nulls are."""
    both_null = pc.and_(before.is_null(), now.is_null())
    mask: NDArray[np.bool_] = pc.or_(pc.fill_null(pc.equal(before, now), False), both_null).to_numpy()
    return mask
