"""List a source in tables of a part each, and plan part by part, by one process or by ranks; one part is in memory.

Samples keep the source's order: that of a list's records, of the rows of files, and of sorted names in a folder. Which
parts there will be is decided once, in a file that the first process writes; every rank uses that file. A part is
planned once its own record is there. Both kinds of records go when the spec is written.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.metadata import PartOnDisk, put_part, put_texts, read_record
from cache_store.errors import CacheError, ConfigError, SourceError
from cache_store.format.layout import PLAN, planned_file
from cache_store.format.plan import caption_of
from cache_store.format.record import FORMAT_VERSION, Record, canonical_json, sign
from cache_store.format.schema import PartTexts
from cache_store.log import log_info, log_warning
from cache_store.messages import abridge, printable
from cache_store.storage.store import Store
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.config import BuildConfig
from precompute.encode.rank import Rank
from precompute.inputs.arrange import Shard
from precompute.sources.config import SOURCES
from precompute.sources.images import ALL, Names
from precompute.sources.listing import Samples
from precompute.sources.media import Bare, refuse_missing
from precompute.sources.place import MISSING
from precompute.sources.tables import make_table


class ListedParts:
    """Iterates over a source's samples, a table of each part, and counts those without their image or text."""

    def __init__(
        self,
        list_part: Callable[[Names], Samples],
        names: Sequence[Names],
        config: BuildConfig,
        withdrawn: pa.Array | None = None,
        unchanged: Mapping[int, int] | None = None,
    ) -> None:
        """`names` has an entry for each part; `[ALL]` is one list, cut every `rows_per_part` samples.

        Samples of the ids `withdrawn` are passed over. Parts that are `unchanged`, of so many rows, are not listed.
        """
        self._list_part, self.names, self._config, self._withdrawn = list_part, names, config, withdrawn
        self.where, self.unchanged = f"source.path: {config.source.path}", unchanged or {}
        self.rows = sum(self.unchanged.values())
        self._seen: Samples | None = None
        self._bare, self.with_bare = list[Bare](), set[Names]()

    @property
    def rows_per_part(self) -> int:
        return self._config.store.rows_per_part

    @property
    def is_cut(self) -> bool:
        return self.names != [ALL]

    def __iter__(self) -> Iterator[pa.Table]:
        """Raise SourceError for a sample that no plan can hold, and if there are none."""
        for names in (names for number, names in enumerate(self.names) if number not in self.unchanged):
            yield from self.tables(names)
        if not self.rows:
            raise SourceError("; ".join(filter(None, [f"{self.where} holds no samples", self._note])))

    def tables(self, names: Names) -> Iterator[pa.Table]:
        """List an entry of `names`: one table, perhaps empty, or those of a list that is cut."""
        samples = self._list_part(names)
        self._seen = samples.behind(self._seen)
        rest, most = iter(samples), None if self.is_cut else self.rows_per_part
        for number in count():
            part = make_table(islice(rest, most), samples.extra, self.where)
            if not part.num_rows and (number or not self.is_cut):
                break
            if self._withdrawn:
                part = part.filter(pc.invert(pc.is_in(part["id"], self._withdrawn)))
            self.count(names, part.num_rows, self.bare_of(part))
            yield part
            if self.is_cut:
                break

    def count(self, names: Names, rows: int, bare: Sequence[Bare]) -> None:
        self.rows += rows
        self._bare += bare
        self.with_bare |= {names} if bare else set()

    def bare_of(self, part: pa.Table) -> list[Bare]:
        if self._config.source.text:
            turns = (each for chunk in part["conversations"].chunks for each in chunk.to_pylist())
            is_bare = pa.array((each is not None and caption_of(each) is None for each in turns), pa.bool_())
        else:
            is_bare = pc.fill_null(pc.equal(part["fingerprint"], MISSING), False)
        bare = part.filter(is_bare)
        return [*zip(bare["id"].to_pylist(), bare["uri"].to_pylist(), strict=True)]

    @property
    def _note(self) -> str:
        return self._seen.note if self._seen else ""

    @property
    def has_missing_images(self) -> bool:
        """Whether images are missing, which may come back; a text stands in the plan, and does not."""
        return not self._config.source.text and bool(self._bare)

    def refuse_bare(self) -> None:
        allowed = self._config.run.max_reject_fraction
        if len(self._bare) > allowed * self.rows:
            refuse_missing(self._bare, self.rows, self._config.source, self._config.media, allowed)

    def say(self) -> None:
        if self._note:
            log_info(printable(self._note))
        for warning in self._seen.warnings(SOURCES[self._config.source.kind].add_texts) if self._seen else ():
            log_warning(printable(warning))


NAMES_FILE = f"{PLAN}/parts.json"


class PlanNames(Record, frozen=True, kw_only=True):
    """The source's names for each part."""

    max_bytes: ClassVar[int] = 2**30

    format_version: int
    made_of: str
    """SHA-256 over config and recipe, and what tells a change of the source's list."""
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
    made_of = inputs.config.recorded(), inputs.recipe.digest, inputs.source.list_version()
    digest, names = hashlib.sha256(msgspec.json.encode(made_of, order="sorted")).hexdigest(), tuple(listing.names)
    return sign(PlanNames(format_version=FORMAT_VERSION, made_of=digest, names=names, sha256=""))


def read_names(store: Store) -> PlanNames | None:
    return read_record(PlanNames, store, NAMES_FILE) if store.has(NAMES_FILE) else None


def plan_as_rank(inputs: BuildInputs, listing: ListedParts, rank: Rank) -> list[int]:
    """Plan this rank's parts of a new cache; return their numbers. CacheError if others plan another list."""
    if not listing.is_cut:
        raise ConfigError(f"{listing.where} is listed as one; plan it by one process, without --rank")
    store, now = inputs.store, names_now(inputs, listing)
    store.put_if_absent(NAMES_FILE, canonical_json(now))
    names = read_names(store)
    if names is None or names.made_of != now.made_of:
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
    for name in store.list(PLAN):
        if ".json" in name:  # or a scratch file of one
            store.delete(f"{PLAN}/{name}")
