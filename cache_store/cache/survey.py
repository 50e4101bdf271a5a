"""Read a cache's records once; builds, repairs and verifications decide from the result.

Nothing here decides: a file gives its contents or says what is wrong with it; OSError if it exists but was not read.
Shard files and samples tables are checked for their size only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import msgspec

from cache_store.cache.metadata import (
    PartOnDisk,
    file_record,
    has_cache,
    open_part,
    parse_checked_spec,
    read_checked_seal,
    read_record,
    read_roll,
    read_texts,
    table_record,
)
from cache_store.errors import CacheError, NewerFormatError, OlderFormatError
from cache_store.format.formats import shard_format
from cache_store.format.layout import BUILD_FILE, COMMITS, PLAN, SPEC_FILE, commit_file, part_file
from cache_store.format.roll import Roll
from cache_store.format.schema import BuildRecord, CommitRecord, FileRecord, PartTexts, Recipe, Seal, Spec
from cache_store.messages import refuse_other_recipe
from cache_store.storage.store import Address, Store, map_calls, open_store, with_listing

T = TypeVar("T")

OwnShards = Callable[[Iterable[int]], list[int]]
"""Chooses the shards of one rank."""


@dataclass(frozen=True)
class Reading(Generic[T]):
    """The parsed contents of a file, or what is wrong with it; both None if there is no file."""

    value: T | None = None
    problem: CacheError | None = None

    @property
    def is_absent(self) -> bool:
        return self.value is None and self.problem is None


@dataclass(frozen=True, kw_only=True)
class ShardOnDisk:
    """A commit record, and the files that it names whose sizes are wrong."""

    record: Reading[CommitRecord]
    file_problems: Mapping[str, CacheError] = field(default_factory=dict)
    """Problem of each such file, by its name."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The records of a cache as they are on disk; empty for a new cache."""

    store: Store
    has_cache: bool = False
    spec: Reading[Spec] = field(default_factory=Reading)
    seal: Reading[Seal] = field(default_factory=Reading)
    roll: Reading[Roll] = field(default_factory=Reading)
    """Facts of each shard, as they were sealed."""
    rejected: Reading[FileRecord] = field(default_factory=Reading)
    """The file of rejected rows, as it was sealed."""
    build: Reading[BuildRecord] = field(default_factory=Reading)
    parts: Sequence[Reading[PartOnDisk]] = ()
    """The parts of the spec or the seal; without both, those whose files are there, up to the first gap."""
    texts: Mapping[int, PartTexts] = field(default_factory=dict)
    """The texts in force of each part whose file is as texts.json says; read with the plan."""
    stated_texts: Mapping[int, PartTexts] = field(default_factory=dict)
    """Those of all parts, whatever their files are."""
    texts_before: Sequence[PartTexts] = ()
    """Texts that were in force before, by part."""
    shards: Mapping[int, ShardOnDisk] = field(default_factory=dict)
    """Shards that have a commit record, damaged ones included."""
    metadata: Mapping[str, bytes | None] = field(default_factory=dict)
    """Bytes of the files that the spec determines; None for one that cannot be read."""

    @property
    def specs(self) -> list[Spec]:
        return [spec for spec in (self.spec.value, self.seal.value and self.seal.value.spec) if spec]

    @property
    def records(self) -> dict[int, CommitRecord]:
        return {shard: each.record.value for shard, each in self.shards.items() if each.record.value is not None}


def survey(cache: Address, build: Reading[BuildRecord] | None = None) -> Survey:
    """Read a cache's records and its plan; `build` is the build record, if the caller has just read it.

    The digests of a part are those that it states, if its file is as sealed or listed; else its rows are read. Raises
    NewerFormatError, and OlderFormatError if nothing readable can restore what the spec lacks.
    """
    found = survey_records(cache, build)
    if not found.has_cache:
        return found
    parts = map_calls(found.store, lambda part: try_read(partial(read_part, found, part)), range(count_parts(found)))
    in_force = try_read(partial(read_texts, found.store)).value
    stated, before = (dict(enumerate(in_force.parts)), in_force.before) if in_force else ({}, ())
    texts = sound_texts(found.store, stated)
    return replace(found, parts=tuple(parts), texts=texts, stated_texts=stated, texts_before=before)


def survey_as_rank(cache: Address, own: OwnShards) -> Survey:
    """Read the records of a rank's own shards alone; the plan, whose parts it opens as it needs them, is trusted."""
    found = survey_records(cache, own=own)
    in_force = try_read(partial(read_texts, found.store)).value if found.has_cache else None
    return replace(found, texts=dict(enumerate(in_force.parts))) if in_force else found


def survey_records(cache: Address, build: Reading[BuildRecord] | None = None, own: OwnShards | None = None) -> Survey:
    """Read a cache's records, all or those of `own` shards, without the plan, whose size grows with the data set."""
    if not has_cache(store := open_store(cache)):
        return Survey(store=store)
    group = try_read(partial(store.read, SPEC_FILE, Spec.max_bytes))
    spec = Reading[Spec](problem=group.problem)
    if group.value is not None:
        spec = try_read(partial(parse_checked_spec, group.value, store.where(SPEC_FILE)))
    if isinstance(spec.problem, NewerFormatError):
        raise spec.problem
    numbers = record_numbers(names_in(there := with_listing(store), COMMITS))
    seal, roll, rejected = try_read(partial(read_checked_seal, store)), Reading[Roll](), Reading[FileRecord]()
    if seal.value:
        roll = try_read(partial(read_roll, store, seal.value))
        rejected = try_read(partial(sealed_record, store, seal.value.rejected_file))
    found = Survey(
        store=store,
        has_cache=True,
        spec=spec,
        seal=seal,
        roll=roll,
        rejected=rejected,
        build=build or survey_build(store),
        shards=without_foreign_records(
            dict(read_shards(there, own(numbers) if own else numbers)), seal.value, roll.value
        ),
        metadata={SPEC_FILE: group.value, **read_array_metadata(store, spec.value)},
    )
    if isinstance(spec.problem, OlderFormatError) and not found.records and found.seal.value is None:
        raise spec.problem
    return found


def survey_build(store: Store) -> Reading[BuildRecord]:
    return try_read(partial(read_record, BuildRecord, store, BUILD_FILE))


def held_recipe(survey: Survey) -> Recipe | None:
    """Return the recipe of the records, else of the spec, else of the seal; StaleError if two records differ."""
    records = [record for _, record in sorted(survey.records.items())]
    for record in records[1:]:
        refuse_other_recipe(survey.store, records[0], record)
    if records:
        return records[0].content.recipe
    if survey.spec.value:
        return survey.spec.value.recipe
    return survey.seal.value.spec.recipe if survey.seal.value else None


def try_read(parse: Callable[[], T]) -> Reading[T]:
    try:
        return Reading(parse())
    except (FileNotFoundError, NotADirectoryError):
        return Reading()
    except CacheError as error:
        return Reading(problem=error)


def read_array_metadata(store: Store, spec: Spec | None) -> dict[str, bytes | None]:
    names = shard_format(spec).metadata().keys() - {SPEC_FILE} if spec else ()
    return {name: try_read(partial(store.read, name)).value for name in names}


def count_parts(found: Survey) -> int:
    """Count the parts of the spec, else of the seal, else those whose files are there, up to the first that is not."""
    if found.specs:
        return len(found.specs[0].parts)
    names = {f"{PLAN}/{name}" for name in names_in(found.store, PLAN)}
    return next(part for part in range(len(names) + 1) if part_file(part) not in names)


def read_part(found: Survey, number: int) -> PartOnDisk:
    seal, build, name = found.seal.value, found.build.value, part_file(number)
    part, file = open_part(found.store, number), table_record(found.store, name)
    known = [each.sha256 for each in seal.plan_files] if seal else []
    listed = build.listed.plan if build and build.listed else ()
    is_known = file.sha256 in (*known[number : number + 1], *listed[number : number + 1])
    digests = part.stated_digests if is_known else part.computed_digests()
    return PartOnDisk(file=file, digests=digests, lengths=tuple(part.lengths), sizes=part.sizes, is_known=is_known)


def sealed_record(store: Store, sealed: FileRecord) -> FileRecord:
    try:
        if file_record(store, sealed.path) == sealed:
            return sealed
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(f"{store.where(sealed.path)} is missing") from None
    raise CacheError(f"{store.where(sealed.path)} is not as sealed")


def sound_texts(store: Store, parts: Mapping[int, PartTexts]) -> dict[int, PartTexts]:
    found = map_calls(store, lambda part: try_read(partial(table_record, store, parts[part].file(part).path)), [*parts])
    pairs = zip(parts.items(), found, strict=True)
    return {part: each for (part, each), file in pairs if file.value == each.file(part)}


def record_numbers(names: Iterable[str]) -> list[int]:
    stems = (name.removesuffix(".json") for name in names)
    return [int(stem) for stem in stems if stem.isdecimal() and commit_file(int(stem)) == f"{COMMITS}/{stem}.json"]


def read_shards(store: Store, shards: Sequence[int]) -> Iterator[tuple[int, ShardOnDisk]]:
    readings = map_calls(store, partial(read_shard_record, store, {}), shards)
    for shard, record in zip(shards, readings, strict=True):
        if not record.is_absent:
            files = record.value.content.files if record.value else ()
            problems = {file.path: problem for file in files if (problem := size_problem(store, file))}
            yield shard, ShardOnDisk(record=record, file_problems=problems)


def without_foreign_records(
    shards: dict[int, ShardOnDisk], seal: Seal | None, roll: Roll | None
) -> dict[int, ShardOnDisk]:
    """Treat records of another recipe than the seal's as damaged, as another cache's, if any record is as sealed."""
    records = {shard: each.record.value for shard, each in shards.items() if each.record.value}
    if seal and roll and any(roll.holds(shard, record.content) for shard, record in records.items()):
        foreign = Reading[CommitRecord](problem=CacheError("is another cache's: its recipe is not the sealed one"))
        others = (shard for shard, record in records.items() if record.content.recipe != seal.spec.recipe)
        return shards | dict.fromkeys(others, ShardOnDisk(record=foreign))
    return shards


def read_shard_record(store: Store, recipes: dict[Recipe, Recipe], shard: int) -> Reading[CommitRecord]:
    """Read a commit record and share equal recipes between records, which saves an eighth of the memory."""
    record = try_read(partial(read_record, CommitRecord, store, commit_file(shard)))
    if record.value:
        recipe = recipes.setdefault(record.value.content.recipe, record.value.content.recipe)
        msgspec.structs.force_setattr(record.value.content, "recipe", recipe)
    return record


def names_in(store: Store, folder: str) -> list[str]:
    """List the names in a folder, those of folders without their slash; nothing if a file is in its place."""
    try:
        return [name.rstrip("/") for name in store.list(folder)]
    except NotADirectoryError:
        return []


def size_problem(store: Store, file: FileRecord) -> CacheError | None:
    """Return the error of a file that is missing or not of its recorded size; else None."""
    where = store.where(file.path)
    try:
        size = store.size(file.path)
    except (FileNotFoundError, NotADirectoryError):
        return CacheError(f"{where} is missing")
    except CacheError as error:
        return error
    return None if size == file.bytes else CacheError(f"{where} is {size} bytes, expected {file.bytes}")
