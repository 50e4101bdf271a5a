"""Find the planned samples in a source's list, by id: known samples keep their rows; the others are new."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.cache.metadata import extra_kinds, open_part, open_texts
from cache_store.errors import SourceError
from cache_store.format.layout import texts_file
from cache_store.format.plan import is_withdrawn, samples_digest, texts_digest, without_samples
from cache_store.format.schema import Listed
from cache_store.format.tables import CLIP_START, NO_VALUES, PLAN_SCHEMA
from cache_store.messages import SHOWN_NAMES, abridge
from cache_store.storage.store import Store
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.planning import ListedParts, PlannedPart
from precompute.build.stated import Stated
from precompute.sources.images import ALL, Names
from precompute.sources.listing import Samples
from precompute.sources.tables import LISTED, joined, recut, refuse_duplicates, with_column

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
        """`match` finds a part in a table; one of those that are `lost`, in the first rows of a table."""
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
    """Find the samples of a part in a table of a list; return them and the table's other rows, or raise SourceError.

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
    both = ((planned[name], rows[name]) for name in names)
    equal = [pc.if_else(was.is_null(), now.is_null(), pc.fill_null(pc.equal(was, now), False)) for was, now in both]
    differs = ~np.logical_and.reduce([each.to_numpy() for each in equal]) & ~lacks
    others = listed.filter(pa.array(is_other))
    if (twice := pc.is_in(others["id"], planned["id"].combine_chunks())) and pc.any(twice).as_py():
        raise SourceError(f"the source has {abridge(others['id'].filter(twice).to_pylist())} more than once")
    return Found(part, rows, planned, lacks, differs), others


MOVES = ("fingerprint", "place")
"""Columns of a sample that may change while it stays the same."""


@dataclass(kw_only=True)
class SourceNow:
    """The source as it is now, beside the plan; nothing is written yet."""

    listing: ListedParts | None = None
    """None if it was not listed, because a look at its files told that they are unchanged."""
    version: str | None = None
    """Its version before the listing; None if every build must list it."""
    found: dict[int, pa.Table] = field(default_factory=dict)
    """Rows of the parts whose files moved or changed, or that are lost; with their texts if those are lost."""
    missing: Sequence[int] = ()
    """Lost parts that it does not have."""
    is_in_place: bool = True
    """Whether its parts are those of the plan, in their order."""
    other_texts: list[int] = field(default_factory=list)
    """Parts whose texts are lost, and for which it has others."""
    num_other_texts: int = 0
    """Parts whose texts in the source are not those in force."""
    difference: dict[str, SomeIds] = field(default_factory=dict)
    """Samples that are NEW, once they are counted; GONE; or RENAMED."""
    new: Iterator[pa.Table] = field(default_factory=lambda: iter(()))
    """The samples that no part has; they are listed while they are read."""

    def count_new(self) -> int:
        for table in self.new:
            self.note_difference(NEW, table["id"])
        return self.difference[NEW].total if NEW in self.difference else 0

    def note_difference(self, what: str, ids: pa.ChunkedArray) -> None:
        if len(ids):
            self.difference[what] = self.difference.get(what, SomeIds()).with_more(ids)


def look_at_source(inputs: BuildInputs, stated: Stated) -> SourceNow:
    """List the source, unless a look at its files shows that the plan is its list; find there the plan's samples."""
    version, held = inputs.source.version(), held_listing(inputs, stated)
    if version is not None and held and held.source == version and not inputs.request.has_extra_work:
        return SourceNow(version=version)
    listing = list_source(inputs, stated, held)
    return compare_lists(
        stated,
        listing,
        lambda part: open_part(inputs.store, part).whole(),
        partial(restored, inputs, stated),
        version,
    )


def held_listing(inputs: BuildInputs, stated: Stated) -> Listed | None:
    """Return the versions that were listed with this config, if they gave the plan on disk, and it is whole."""
    build = stated.survey.build.value
    if build is None or build.listed is None or not stated.is_whole or build.config != inputs.config.recorded():
        return None
    files = tuple(each.file.sha256 for each in stated.parts.values())
    return build.listed if build.listed.plan == files else None


def listed_now(
    inputs: BuildInputs, stated: Stated, now: SourceNow, parts: int, changed: Collection[int], *, is_all: bool
) -> Listed:
    """Return the versions that a rerun compares, still without the plan's files; None where it has to look again."""
    build, listing = stated.survey.build.value, now.listing
    if not is_all:
        return Listed(source=None, plan=())
    if listing is None:
        return Listed(
            source=None if changed else now.version, plan=(), parts=build.listed.parts if build and build.listed else ()
        )
    has_own_files = listing.is_cut and now.is_in_place and len(listing.names) == parts
    versions = tuple(
        None if number in changed or names in listing.with_bare else inputs.source.version(names)
        for number, names in enumerate(listing.names if has_own_files else ())
    )
    return Listed(source=None if changed or listing.has_missing_images else now.version, plan=(), parts=versions)


def list_source(inputs: BuildInputs, stated: Stated, held: Listed | None = None) -> ListedParts:
    """Prepare to list the source, but for parts in the versions held; videos whose clips are planned need no look."""
    config, source, build = inputs.config, inputs.source, stated.survey.build.value
    has_same_clips = build is not None and build.config.get("clip") == config.recorded()["clip"]

    def list_part(own: Names) -> Samples:
        parts = [part for part in stated.parts if own == ALL or (part < len(names) and names[part] == own)]
        known = (open_part(inputs.store, part).whole() for part in (parts if has_same_clips else ()))
        return inputs.reader.samples(source.samples(own), known)

    names = source.parts(config.store.rows_per_part)
    versions = enumerate(zip(names, held.parts if held else (), strict=False))
    unchanged = [part for part, (own, version) in versions if version is not None and source.version(own) == version]
    rows = {part: stated.parts[part].digests.part.rows for part in unchanged}
    return ListedParts(list_part, names, config, withdrawn_ids(inputs.store, stated), rows)


def compare_lists(
    stated: Stated,
    listing: ListedParts,
    planned: Callable[[int], pa.Table],
    restore: Callable[[int, pa.Table], pa.Table | None],
    version: str | None = None,
) -> SourceNow:
    """Find the samples of the plan, of which `planned` reads a part, in a list; `restore` finds a lost part's rows."""

    def match_part(number: int, table: pa.Table) -> Matched:
        if number in stated.parts:
            return match(number, planned(number), table)
        count = stated.spec.parts[number].rows if stated.spec else 0
        if table.num_rows < count or (rows := restore(number, table.slice(0, count))) is None:
            return None, table
        none = np.zeros(count, bool)
        return Found(number, rows, None, none, none), table.slice(count)

    looked_at = [part for part in range(stated.num_parts) if part not in listing.unchanged]
    matcher, now = Matcher(looked_at, match_part, stated.lost), SourceNow(listing=listing, version=version)
    for each in matcher.find(listing):
        take_part(now, stated, each)
    now.missing, now.is_in_place = matcher.missing, matcher.is_in_place
    if listing.is_cut:
        behind = (table for table in matcher.behind if table.num_rows)
        now.new = chain(behind, recut(matcher.rest, listing.rows_per_part))
    else:
        now.new = recut(chain(matcher.rest, matcher.behind), listing.rows_per_part)
    return now


def withdrawn_ids(store: Store, stated: Stated) -> pa.Array:
    """Return the ids of all withdrawn samples: no build brings one back, not as a new one either."""
    with_some = [number for number, each in stated.parts.items() if any(each.digests.withdrawn)]
    tables = (open_part(store, number).whole(["id", "state"]) for number in with_some)
    ids = [chunk for rows in tables for chunk in rows.filter(pa.array(is_withdrawn(rows)))["id"].chunks]
    return pa.chunked_array(ids, pa.string()).combine_chunks()


def restored(inputs: BuildInputs, stated: Stated, part: int, listed: pa.Table) -> pa.Table | None:
    """Return the rows of a lost part if these samples, planned anew, are those of the spec; its texts on disk stay."""
    assert stated.spec
    rows = pa.concat_tables([rows for rows, _ in make_arranger(inputs)(listed)]) if listed.num_rows else listed
    if samples_digest(rows) != stated.spec.parts[part].digest:
        return None
    if texts := stated.survey.texts.get(part):
        kept = open_texts(inputs.store, part, texts).whole()
        rows = rows.select([name for name in rows.column_names if name not in kept.column_names])
        for name in kept.column_names:
            rows = rows.append_column(kept.schema.field(name), kept[name])
    return rows


def take_part(now: SourceNow, stated: Stated, each: Found) -> None:
    """Note how a part differs in the source."""
    if each.planned is not None and (each.lacks | each.differs).any():
        now.note_difference(GONE, each.planned["id"].filter(pa.array(each.lacks)))
        now.note_difference(RENAMED, each.planned["id"].filter(pa.array(each.differs)))
        return
    rows, texts, survey = each.rows, stated.survey.texts.get(each.part), stated.survey
    encodes_texts = stated.spec is not None and stated.spec.array.text is not None
    is_lost, held = each.planned is None or not texts, survey.stated_texts.get(each.part)
    if held and held.digest != texts_digest(rows):
        now.num_other_texts += bool(texts)
        now.other_texts += [] if texts else [each.part]
    elif not held and others_of(survey.store, texts_file(each.part, texts_digest(rows))):
        now.other_texts.append(each.part)
    before = rows if each.planned is None else each.planned
    is_moved = any(not rows[name].equals(before[name]) for name in MOVES)
    if is_lost or (is_moved and not encodes_texts):  # no file is read for a text
        names = [name for name in rows.column_names if name in PLAN_SCHEMA.names]
        now.found[each.part] = rows if is_lost else rows.select(names)


def others_of(store: Store, file: str) -> list[str]:
    """Return other versions of the texts of a part, of which none is known to be in force."""
    folder, name = file.split("/")
    part = name.partition("-")[0]
    return [each for each in store.list(folder) if each.startswith(f"{part}-") and each != name]


def refuse_unfit_parts(store: Store, stated: Stated, added: Sequence[PlannedPart], where: str) -> None:
    """Raise SourceError for ids that the plan then has more than once, and for an extra column that no sample has."""
    texts = dict(enumerate((each.texts for each in added), start=stated.num_parts))
    before = {part: each for part, each in stated.survey.texts.items() if part < stated.num_parts}
    refuse_empty_columns(extra_kinds(store, before | texts), where)
    parts = *stated.parts, *texts
    refuse_duplicates(lambda: (open_part(store, part).whole(["id", "uri"]) for part in parts), where)


def refuse_empty_columns(kinds: dict[str, str], where: str) -> None:
    for name in (name for name, kind in kinds.items() if kind == NO_VALUES):
        raise SourceError(f"{where}: source.fields.extra: no sample has {name}; correct its name, or leave it out")
