"""Plan samples part by part, by one process or by ranks at the same time; one part is in memory.

Which parts there will be is decided once, in a file that the first process writes; every rank uses that file. A part is
planned once its own record is there. Both kinds of records go when the spec is written.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec

from cache_store.cache.metadata import PartOnDisk, put_part, put_texts, read_record
from cache_store.errors import CacheError, ConfigError, SourceError
from cache_store.format.layout import PLAN, planned_file
from cache_store.format.record import FORMAT_VERSION, Record, canonical_json, sign
from cache_store.format.schema import PartTexts
from cache_store.messages import abridge
from cache_store.storage.store import Store
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.listing import Bare, ListedParts
from precompute.encode.rank import Rank
from precompute.inputs.arrange import Shard
from precompute.sources.images import Names

NAMES_FILE = f"{PLAN}/parts.json"


class PlanNames(Record, frozen=True, kw_only=True):
    """The source's names for each part."""

    max_bytes: ClassVar[int] = 2**30

    format_version: int
    settings: str
    """SHA-256 over the config and the recipe."""
    version: str
    """Changes with what the source lists."""
    names: tuple[Names, ...]
    sha256: str


class PlannedPart(Record, frozen=True, kw_only=True):
    """A part that was planned, and its texts."""

    max_bytes: ClassVar[int] = 2**30

    format_version: int
    plan: str
    """The SHA-256 of the names that it was planned for."""
    on_disk: PartOnDisk
    texts: PartTexts
    bare: tuple[Bare, ...]
    sha256: str


def names_now(inputs: BuildInputs, listing: ListedParts) -> PlanNames:
    made_of = msgspec.json.encode((inputs.config.recorded(), inputs.recipe.digest), order="sorted")
    settings, version = hashlib.sha256(made_of).hexdigest(), inputs.source.list_version()
    names = tuple(listing.names)
    return sign(PlanNames(format_version=FORMAT_VERSION, settings=settings, version=version, names=names, sha256=""))


def read_names(store: Store) -> PlanNames | None:
    return read_record(PlanNames, store, NAMES_FILE) if store.has(NAMES_FILE) else None


def plan_as_rank(inputs: BuildInputs, listing: ListedParts, rank: Rank) -> list[int]:
    """Plan this rank's parts of a new cache; return their numbers. CacheError if others plan another list."""
    if not listing.is_cut:
        raise ConfigError(f"{listing.where} is listed as one; plan it by one process, without --rank")
    store, now = inputs.store, names_now(inputs, listing)
    store.put_if_absent(NAMES_FILE, canonical_json(now))
    names = read_names(store)
    if names is None or (names.settings, names.version) != (now.settings, now.version):
        raise CacheError(
            f"{store}: {NAMES_FILE} was written for other settings, or before the source changed; once no rank plans, "
            f"run: {inputs.request.other_command('plan')}"
        )
    own = rank.shards_of(range(len(names.names)))
    for _ in planned_parts(inputs, listing, names, own):
        pass
    return own


def plan_named_parts(inputs: BuildInputs, listing: ListedParts) -> Iterator[PlannedPart]:
    """Plan every part of a new cache, but those that a stopped process or ranks have planned of the same source."""
    store, now = inputs.store, names_now(inputs, listing)
    if read_names(store) != now:
        forget_planned(store)
        store.put_whole(NAMES_FILE, canonical_json(now))
    return planned_parts(inputs, listing, now, range(len(now.names)))


def planned_parts(
    inputs: BuildInputs, listing: ListedParts, plan: PlanNames, numbers: Iterable[int]
) -> Iterator[PlannedPart]:
    """Plan parts, unless they are planned."""
    store, arrange = inputs.store, make_arranger(inputs)
    for number in numbers:
        file, names = planned_file(number), plan.names[number]
        if store.has(file) and (part := read_record(PlannedPart, store, file)).plan == plan.sha256:
            listing.count(names, part.on_disk.digests.part.rows, part.bare)
        else:
            (table,) = listing.tables(names)
            if not table.num_rows:
                raise SourceError(f"{listing.where}: there is no sample in {abridge(names)}; leave it out")
            part = plan_table(store, listing, number, arrange(table), plan.sha256)
            store.put_whole(file, canonical_json(part))
        yield part


def plan_table(store: Store, listing: ListedParts, number: int, shards: Sequence[Shard], plan: str = "") -> PlannedPart:
    """Write the plan and the texts of a part, cut into these shards."""
    tables = [rows for rows, _ in shards]
    return sign(
        PlannedPart(
            format_version=FORMAT_VERSION,
            plan=plan,
            on_disk=put_part(store, number, [(rows, size.name) for rows, size in shards]),
            texts=put_texts(store, number, tables),
            bare=tuple(bare for rows in tables for bare in listing.bare_of(rows)),
            sha256="",
        )
    )


def forget_planned(store: Store) -> None:
    """Delete the records of planning: the spec has the plan now, or it is made anew."""
    for name in store.list(PLAN):
        if name.endswith(".json"):
            store.delete(f"{PLAN}/{name}")
