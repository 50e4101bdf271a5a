"""All that a cache's folder says about itself, read once: what builds, repairs and verifications decide by.

Nothing here judges: a file is read, or it is said why not. Shard files and samples tables are looked at for their size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import msgspec
import pyarrow as pa

from cache_store.cache.files import open_recorded_plan, open_table
from cache_store.cache.metadata import has_cache, parse_checked_spec, read_record
from cache_store.cache.writing.withdrawn import withdrawn_shards
from cache_store.errors import CacheError, NewerFormatError, OlderFormatError
from cache_store.format.formats import shard_format
from cache_store.format.names import BUILD_FILE, COMMITS, SAMPLES, SEAL_FILE, SPEC_FILE, commit_file
from cache_store.format.plan import PlanDigests, PlanFile
from cache_store.format.schema import BuildRecord, CommitRecord, FileRecord, Recipe, Seal, Spec
from cache_store.refusal import refuse_other_recipe
from cache_store.storage.store import Address, Store, listed_once, open_store, wait_together

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """What a file holds, or why that cannot be told; neither where there is no file."""

    value: T | None = None
    problem: CacheError | OSError | None = None

    @property
    def is_absent(self) -> bool:
        return self.value is None and self.problem is None


@dataclass(frozen=True, kw_only=True)
class PlanOnDisk:
    plan: PlanFile
    """It is the sealed one, one whose rows are known or stated, or every row of it could be read."""
    file: FileRecord
    digests: PlanDigests
    """Of the rows that the spec has, or of all where there is no spec."""


@dataclass(frozen=True, kw_only=True)
class ShardOnDisk:
    """A commit record, and what is wrong with the files that it names, as far as their sizes tell."""

    record: Reading[CommitRecord]
    file_problems: Mapping[str, CacheError | OSError] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A cache as it lies on disk; of a new one, nothing."""

    store: Store
    has_cache: bool = False
    spec: Reading[Spec] = field(default_factory=Reading)
    seal: Reading[Seal] = field(default_factory=Reading)
    build: Reading[BuildRecord] = field(default_factory=Reading)
    plan: Reading[PlanOnDisk] = field(default_factory=Reading)
    shards: Mapping[int, ShardOnDisk] = field(default_factory=dict)
    """Those that have a commit record, be it damaged."""
    withdrawn: frozenset[int] = frozenset()
    """Shards whose record was withdrawn to replace their files, by the marks of a store that no claim guards."""
    metadata: Mapping[str, bytes | None] = field(default_factory=dict)
    """The files that the spec determines, as far as they can be read."""
    ids: Mapping[int, str] = field(default_factory=dict)
    """Rows and ids by the samples tables, where the plan is lost or another than the spec's."""

    @property
    def records(self) -> dict[int, CommitRecord]:
        """Those that can be read."""
        return {shard: each.record.value for shard, each in self.shards.items() if each.record.value is not None}

    def raise_unreadable(self) -> None:
        """The system's error for a file that lies there and cannot be read: it may hold what it should."""
        problems = [self.spec.problem, self.seal.problem, self.build.problem, self.plan.problem]
        for problem in (*problems, *(each.record.problem for each in self.shards.values())):
            if isinstance(problem, OSError):
                raise problem


def survey(
    cache: Address,
    known_plans: Mapping[str, PlanDigests] | None = None,
    build: Reading[BuildRecord] | None = None,
) -> Survey:
    """Read what there is; NewerFormatError where the spec is of a version that this program does not know, and
    OlderFormatError where it lacks a field and no record makes good for it.

    `known_plans` has digests of rows by the SHA-256 of the plan file that holds them; `build` is the build record, if
    it was read already.
    """
    found = survey_records(cache, build)
    if not found.has_cache:
        return found
    store, spec = found.store, found.spec.value
    plan = read(partial(read_plan_file, found, known_plans or {}))
    is_planned = spec and plan.value and plan.value.digests.whole == spec.plan_digest
    return replace(found, plan=plan, ids={} if is_planned else dict(ids_by_row(store)))


def survey_as_stated(cache: Address) -> Survey:
    """All, but the plan's rows are taken for what spec and records say of them: none is read, however many there are.

    For those that build from a plan which many share; whoever seals the cache reads every row.
    """
    found = survey_records(cache)
    return replace(found, plan=read(partial(stated_plan, found, found.spec.value))) if found.spec.value else found


def survey_records(cache: Address, build: Reading[BuildRecord] | None = None) -> Survey:
    """All but the plan, which grows with the data set."""
    if not has_cache(store := open_store(cache)):
        return Survey(store=store)
    group = read(partial(store.read, SPEC_FILE, Spec.max_bytes))
    spec = Reading[Spec](problem=group.problem)
    if group.value is not None:
        spec = read(partial(parse_checked_spec, group.value, store.where(SPEC_FILE)))
    if isinstance(spec.problem, NewerFormatError):
        raise spec.problem
    names = names_in(there := listed_once(store), COMMITS)
    found = Survey(
        store=store,
        has_cache=True,
        spec=spec,
        seal=read(partial(read_record, Seal, store, SEAL_FILE)),
        build=build or survey_build(store),
        shards=dict(read_shards(there, names)),
        withdrawn=withdrawn_shards(names),
        metadata={SPEC_FILE: group.value, **metadata_beside(store, spec.value)},
    )
    if isinstance(spec.problem, OlderFormatError) and not found.records and found.seal.value is None:
        raise spec.problem
    return found


def survey_build(store: Store) -> Reading[BuildRecord]:
    return read(partial(read_record, BuildRecord, store, BUILD_FILE))


def held_recipe(survey: Survey) -> Recipe | None:
    """What the shards were made with, by the records, or else the spec, or else the seal; None where all are lost.

    StaleError, naming both, where two records have two recipes.
    """
    records = [record for _, record in sorted(survey.records.items())]
    for record in records[1:]:
        refuse_other_recipe(survey.store, records[0], record)
    if records:
        return records[0].content.recipe
    if survey.spec.value:
        return survey.spec.value.recipe
    return survey.seal.value.recipe if survey.seal.value else None


def read(parse: Callable[[], T]) -> Reading[T]:
    try:
        return Reading(parse())
    except FileNotFoundError:
        return Reading()
    except (CacheError, OSError) as error:
        return Reading(problem=error)


def metadata_beside(store: Store, spec: Spec | None) -> dict[str, bytes | None]:
    """The other files that the spec determines."""
    names = shard_format(spec).metadata().keys() - {SPEC_FILE} if spec else ()
    return {name: read(partial(store.read, name)).value for name in names}


def read_plan_file(found: Survey, known_plans: Mapping[str, PlanDigests]) -> PlanOnDisk:
    """The plan, a shard of it in memory at a time; of one that was sealed, or is known, no row is looked at."""
    store, spec = found.store, found.spec.value
    plan, file = open_recorded_plan(store)  # OSError where the system cannot read it: that is no damage
    digests = sealed_digests(found, file) or known_plans.get(file.sha256)
    if digests is None or (spec and digests.whole != spec.plan_digest):
        digests = plan.digests(spec.rows if spec else None)
    return PlanOnDisk(plan=plan, file=file, digests=digests)


def stated_plan(found: Survey, spec: Spec) -> PlanOnDisk:
    store, records = found.store, found.records
    by_shard = (records[shard].content.plan_digest if shard in records else "" for shard in range(spec.num_shards))
    digests = PlanDigests(spec.plan_digest, tuple(by_shard))
    plan, file = open_recorded_plan(store)
    return PlanOnDisk(plan=plan, file=file, digests=digests)


def sealed_digests(found: Survey, file: FileRecord) -> PlanDigests | None:
    """What seal and sealed records say of the plan, if it is the sealed file and no record is lost or another."""
    spec, seal, records = found.spec.value, found.seal.value, found.records
    if spec is None or seal is None or (seal.spec_digest, seal.plan_file) != (spec.digest, file):
        return None
    contents = [records[shard].content for shard in range(spec.num_shards) if shard in records]
    if len(contents) < spec.num_shards or not all(map(seal.holds, range(spec.num_shards), contents)):
        return None
    return PlanDigests(spec.plan_digest, tuple(content.plan_digest for content in contents))


def read_shards(store: Store, names: Iterable[str]) -> Iterator[tuple[int, ShardOnDisk]]:
    """Every shard for which there is a commit record, sound or not, by the names in the folder of records."""
    stems = (name.removesuffix(".json") for name in names)
    shards = [int(stem) for stem in stems if stem.isdecimal() and commit_file(int(stem)) == f"{COMMITS}/{stem}.json"]
    readings = wait_together(store, partial(read_shard_record, store, {}), shards)
    for shard, record in zip(shards, readings, strict=True):
        if not record.is_absent:
            files = record.value.content.files if record.value else ()
            problems = {file.path: problem for file in files if (problem := size_problem(store, file))}
            yield shard, ShardOnDisk(record=record, file_problems=problems)


def read_shard_record(store: Store, recipes: dict[Recipe, Recipe], shard: int) -> Reading[CommitRecord]:
    """With the recipe that an equal one of an earlier record is, which spares an eighth of the memory."""
    record = read(partial(read_record, CommitRecord, store, commit_file(shard)))
    if record.value:
        recipe = recipes.setdefault(record.value.content.recipe, record.value.content.recipe)
        msgspec.structs.force_setattr(record.value.content, "recipe", recipe)
    return record


def names_in(store: Store, folder: str) -> list[str]:
    """Also of folders where files should be; none where something else than a folder lies itself."""
    try:
        return [name.rstrip("/") for name in store.list(folder)]
    except NotADirectoryError:
        return []


def size_problem(store: Store, file: FileRecord) -> CacheError | OSError | None:
    """Why a file is not of the size that its record says."""
    where = store.where(file.path)
    try:
        size = store.size(file.path)
    except FileNotFoundError:
        return CacheError(f"{where} is missing")
    except (CacheError, OSError) as error:
        return error
    return None if size == file.bytes else CacheError(f"{where} is {size} bytes, expected {file.bytes}")


def ids_by_row(store: Store) -> Iterator[tuple[int, str]]:
    """What samples tables say, damaged or not: whether it was right, a digest tells."""
    for name in names_in(store, SAMPLES):
        if name.endswith(".parquet") and (table := read(partial(read_ids, store, f"{SAMPLES}/{name}")).value):
            yield from zip(table["row"].to_pylist(), table["id"].to_pylist(), strict=True)


def read_ids(store: Store, name: str) -> pa.Table:
    return open_table(store, name).whole(["row", "id"])
