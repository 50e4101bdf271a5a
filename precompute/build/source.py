"""Look at the source beside the cache's plan."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import extra_kinds, open_part
from cache_store.errors import SourceError
from cache_store.format.plan import is_withdrawn, samples_digest, texts_digest
from cache_store.format.schema import Spec
from cache_store.format.tables import NO_VALUES, PLAN_SCHEMA
from cache_store.messages import abridge, counted
from cache_store.storage.store import Store
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.listing import ListedParts, joined
from precompute.build.match import Found, Matcher, PlanDifference, SomeIds
from precompute.build.planning import PlannedPart
from precompute.build.stated import Stated
from precompute.sources.images import ALL, Names
from precompute.sources.listing import Samples

MOVES = ("fingerprint", "place")
"""Columns of a sample that may change while it stays the same."""

NO_DIFFERENCE = PlanDifference()


@dataclass(kw_only=True)
class SourceNow:
    """The source as it is now, beside the plan; nothing is written yet."""

    listing: ListedParts | None = None
    """None if it was not listed, because a look at its files told that they are unchanged."""
    version: str | None = None
    """Its version before the listing; None if every build must list it."""
    found: dict[int, pa.Table] = field(default_factory=dict)
    """Rows of the parts whose files moved or changed, or that are lost; with their texts if those are lost."""
    lost: tuple[int, ...] = ()
    """Lost parts that it does not have."""
    is_in_place: bool = True
    """Whether its parts are those of the plan, in their order."""
    other_texts: tuple[int, ...] = ()
    """Parts whose texts are lost, and for which it has others."""
    difference: PlanDifference = NO_DIFFERENCE
    num_other_texts: int = 0
    """Parts whose texts in the source are not those in force."""
    new: Iterator[pa.Table] = field(default_factory=lambda: iter(()))
    """The samples that no part has; they are listed while they are read."""

    def count_new(self) -> SomeIds:
        """List what is new, without planning it."""
        ids = SomeIds()
        for table in self.new:
            ids = ids.with_more(table["id"])
        return ids


def look_at_source(inputs: BuildInputs, stated: Stated) -> SourceNow:
    """List the source, unless the plan still is its list; find there the samples of the plan.

    Listing takes as long as planning, while that check only looks at each source file.
    """
    version, spec = inputs.source.version(), stated.spec
    if not inputs.request.has_extra_work and is_unchanged(inputs, stated, version):
        return SourceNow(version=version)
    planned = partial(read_planned, inputs.store)
    now = compare_lists(stated, list_source(inputs, stated), planned, partial(restored, inputs, spec))
    return replace(now, version=version)


def list_source(inputs: BuildInputs, stated: Stated) -> ListedParts:
    """Prepare to list the source; videos whose clips are planned need no second look."""
    config, build = inputs.config, stated.survey.build.value
    has_same_clips = build is not None and build.config.get("clip") == config.recorded()["clip"]

    def list_part(own: Names) -> Samples:
        parts = [part for part in stated.parts if own == ALL or (part < len(names) and names[part] == own)]
        known = (read_planned(inputs.store, part) for part in (parts if has_same_clips else ()))
        return inputs.reader.samples(inputs.source.samples(own), known)

    names = inputs.source.parts(config.store.rows_per_part)
    return ListedParts(
        list_part, names, config, withdrawn_ids(inputs.store, stated), unchanged_parts(inputs, stated, names)
    )


def unchanged_parts(inputs: BuildInputs, stated: Stated, names: Sequence[Names]) -> dict[int, int]:
    """Return the parts whose files were not written since they were listed for this config, with their rows."""
    build = stated.survey.build.value
    if not build or not build.listed or build.config != inputs.config.recorded() or not stated.is_whole:
        return {}
    pairs = enumerate(zip(names, build.listed.parts, build.listed.plan, strict=False))
    rows = {number: each.digests.part.rows for number, each in stated.parts.items()}
    return {
        number: rows[number]
        for number, (own, version, sha256) in pairs
        if version is not None
        and number in rows
        and stated.parts[number].file.sha256 == sha256
        and inputs.source.version(own) == version
    }


def versions_of(inputs: BuildInputs, now: SourceNow, parts: int, changed: Container[int]) -> tuple[str | None, ...]:
    """Return the version of each part, None if its images have to be looked at.

    Empty unless each part has files of its own.
    """
    listing = now.listing
    if listing is None or not listing.is_cut or not now.is_in_place or len(listing.names) != parts:
        return ()
    is_open = [number in changed or names in listing.with_bare for number, names in enumerate(listing.names)]
    return tuple(
        None if each else inputs.source.version(names) for each, names in zip(is_open, listing.names, strict=True)
    )


def compare_lists(
    stated: Stated,
    listing: ListedParts,
    planned: Callable[[int], pa.Table],
    restore: Callable[[int, pa.Table], pa.Table | None],
) -> SourceNow:
    """Find the samples of the plan in a list; `planned` and `restore` are a Matcher's."""
    known = stated.parts.keys()
    matcher = Matcher(
        stated.num_parts, lambda part: planned(part) if part in known else None, restore, listing.unchanged
    )
    now = SourceNow(listing=listing)
    for each in matcher.find(listing):
        take_part(now, stated, each)
    now.lost, now.is_in_place = tuple(matcher.lost), matcher.is_in_place
    if listing.is_cut:
        behind = (table for table in matcher.behind if table.num_rows)
        now.new = chain(behind, recut(matcher.rest, listing.rows_per_part))
    else:
        now.new = recut(chain(matcher.rest, matcher.behind), listing.rows_per_part)
    return now


def is_unchanged(inputs: BuildInputs, stated: Stated, version: str | None) -> bool:
    """Return whether the plan is whole and was made with this config, and no source file was written since."""
    build = stated.survey.build.value
    if version is None or build is None or (listed := build.listed) is None or not stated.is_whole:
        return False
    files = tuple(each.file.sha256 for each in stated.parts.values())
    return (listed.source, listed.plan, build.config) == (version, files, inputs.config.recorded())


def withdrawn_ids(store: Store, stated: Stated) -> pa.Array:
    """Return the ids of all withdrawn samples: no build brings one back, not as a new one either."""
    with_some = [number for number, each in stated.parts.items() if any(each.digests.withdrawn)]
    tables = (open_part(store, number).whole(["id", "state"]) for number in with_some)
    ids = [chunk for rows in tables for chunk in rows.filter(pa.array(is_withdrawn(rows)))["id"].chunks]
    return pa.chunked_array(ids, pa.string()).combine_chunks()


def read_planned(store: Store, part: int) -> pa.Table:
    """Read the samples of a part, in memory."""
    return open_part(store, part).whole()


def restored(inputs: BuildInputs, spec: Spec | None, part: int, listed: pa.Table) -> pa.Table | None:
    """Return the rows of a lost part if these samples, planned anew, are those of the spec."""
    assert spec
    if listed.num_rows != spec.parts[part].rows:
        return None
    rows = pa.concat_tables([rows for rows, _ in make_arranger(inputs).arrange(listed)])
    return rows if samples_digest(rows) == spec.parts[part].digest else None


def take_part(now: SourceNow, stated: Stated, each: Found) -> None:
    """Note how a part differs in the source."""
    rows, texts = each.rows, stated.survey.texts.get(each.part)
    encodes_texts = stated.spec is not None and stated.spec.array.text is not None
    if each.lacks.any() or each.differs.any():
        assert each.planned is not None
        lacking, others = (each.planned["id"].filter(pa.array(mask)) for mask in (each.lacks, each.differs))
        removed, changed = now.difference.removed.with_more(lacking), now.difference.changed.with_more(others)
        now.difference = PlanDifference(removed=removed, changed=changed)
        return
    held, is_lost = stated.survey.stated_texts.get(each.part), each.planned is None or not texts
    if held and held.digest != texts_digest(rows):
        is_needed = is_lost and (encodes_texts or not texts)
        now.num_other_texts += not is_needed
        now.other_texts += (each.part,) if is_needed else ()
    before = rows if each.planned is None else each.planned
    is_moved = any(not rows[name].equals(before[name]) for name in MOVES)
    if is_lost or (is_moved and not encodes_texts):  # no file is read for a text
        names = [name for name in rows.column_names if name in PLAN_SCHEMA.names]
        now.found[each.part] = rows if is_lost else rows.select(names)


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


def refuse_unfit_parts(store: Store, stated: Stated, added: Sequence[PlannedPart], where: str) -> None:
    """Raise SourceError for ids that the plan then has more than once, and for an extra column that no sample has."""
    texts = dict(enumerate((each.texts for each in added), start=stated.num_parts))
    before = {part: each for part, each in stated.survey.texts.items() if part < stated.num_parts}
    refuse_empty_columns(extra_kinds(store, before | texts), where)
    parts = *stated.parts, *texts
    refuse_duplicates(lambda: (open_part(store, part).whole(["id", "uri"]) for part in parts), where)


def refuse_duplicates(tables: Callable[[], Iterable[pa.Table]], where: str) -> None:
    """Raise SourceError naming ids that these tables have more than once, and two images of the first.

    Ids with equal hashes are compared: among ten million, two have the same one in about one of 400,000 processes.
    """
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


def refuse_empty_columns(kinds: dict[str, str], where: str) -> None:
    """Raise SourceError for an extra column that no sample has."""
    for name in (name for name, kind in kinds.items() if kind == NO_VALUES):
        raise SourceError(f"{where}: source.fields.extra: no sample has {name}; correct its name, or leave it out")
