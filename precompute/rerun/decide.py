"""Decide what a build has to do, from the facts and the request: pure functions that touch no disk.

A cache is the recipe, the list of samples and the shards. Each is on disk more than once, so that a loss is repaired by
copying: the recipe is in the spec, the seal and every record; the list is in the plan and the source; a shard's digest
is in its record and the seal.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import spec_problems
from cache_store.cache.survey import Survey, held_recipe
from cache_store.errors import CacheError, ConfigError
from cache_store.format.formats import shard_format
from cache_store.format.layout import BUILD_FILE, PLAN, SPEC_FILE, commit_file
from cache_store.format.plan import PlanDigests, encoded_texts_digest
from cache_store.format.schema import CommitRecord, FileRecord, PartTexts, Recipe, Seal, Spec
from cache_store.messages import counted
from cache_store.verify.findings import Finding
from cache_store.verify.record import usable_record
from precompute.rerun.facts import Facts
from precompute.rerun.refusals import (
    refuse_lost_list,
    refuse_lost_recipe,
    refuse_mending,
    refuse_other_inputs,
    refuse_other_list,
    refuse_other_report,
    refuse_unfinished_plan,
)
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import Rows

State = Literal["build", "mend", "replace"]
"""`build`: never committed; any content. `mend`: committed or sealed; the same content again, if its digest is known.
`replace`: a committed shard gets other content, because rejected samples can be decoded now.
"""


class Task(NamedTuple):
    """The work on a shard that is not kept."""

    state: State
    allowed: frozenset[str] = frozenset()
    """Content digests that a mended shard may have; empty if none is known."""
    rejected: int = 0
    """Rejected samples of a replaced shard, before."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work left to do: every shard is kept or has a task."""

    spec: Spec
    plan: Rows | None
    """All samples that the cache will hold, as the source has them now; None once the plan is on disk."""
    rows_before: int = 0
    """Rows that the cache was planned with."""
    trusted: Rows | None = None
    """These rows from the plan's files; None if their fingerprints cannot be trusted."""
    plan_files: tuple[FileRecord, ...] = ()
    """The parts' files, as far as they are as they must be; the others have to be written."""
    texts: Mapping[int, PartTexts] = field(default_factory=dict)
    """The texts in force of the parts whose files are sound; those of the others have to be written."""
    source_version: str | None = None
    """Version of the source, if `plan` holds all its samples; None if every build must list it."""
    kept: Mapping[int, CommitRecord] = field(default_factory=dict)
    """Records of the shards that need no work."""
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """The other shards, in order."""
    earlier_seal: Seal | None = None
    has_roll: bool = False
    """Whether shards.bin is as the earlier seal names it."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as damage that is mended."""
    num_retried: int = 0
    """Rejected samples that were tried again."""

    @property
    def is_extension(self) -> bool:
        return 0 < self.rows_before < self.spec.rows

    @property
    def has_other_samples(self) -> bool:
        """Whether this work changes the cache's samples, and so its identity, on purpose."""
        return self.is_extension or bool(self.shards_to("replace"))

    @property
    def is_plan_reused(self) -> bool:
        """Whether this run uses the cache's plan instead of listing the source, because the source is unchanged."""
        return self.plan is not None and self.plan.is_on_disk

    @property
    def to_build(self) -> list[int]:
        return [*self.tasks]

    def shards_to(self, *states: State) -> list[int]:
        return [shard for shard, task in self.tasks.items() if task.state in states]

    @property
    def allowed_digests(self) -> dict[int, frozenset[str]]:
        """Digests that mended shards may have."""
        return {shard: task.allowed for shard, task in self.tasks.items() if task.allowed}

    def source_rows(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a shard's rows, as the source has them now."""
        assert self.plan is not None
        return self.plan.shard(shard, columns)

    @property
    def is_planned(self) -> bool:
        """Whether every part of the plan is on disk."""
        return len(self.plan_files) == len(self.spec.parts)

    def without_plan(self) -> "Work":
        """Drop the plan once it is on disk, so that memory does not grow with the data set."""
        return replace(self, plan=None, trusted=None)

    def with_recovered(self, num_retried: int, shards: Mapping[int, int]) -> "Work":
        """Replace these kept shards; each has a number of rejected samples."""
        tasks = {**self.tasks, **{shard: Task("replace", rejected=count) for shard, count in shards.items()}}
        kept = {shard: record for shard, record in self.kept.items() if shard not in shards}
        return replace(self, num_retried=num_retried, kept=kept, tasks=dict(sorted(tasks.items())))


def decide(facts: Facts, request: BuildRequest) -> Work:
    """Decide the work; raise StaleError if the cache was made from other inputs, ConfigError if it is impossible."""
    survey, found = facts.survey, facts.found
    if not survey.has_cache:
        assert found is not None
        spec = make_spec(facts.recipe, found)
        tasks = dict.fromkeys(range(spec.num_shards), Task("build"))
        return Work(spec=spec, plan=found, source_version=facts.source_version, tasks=tasks)
    refuse_other_report(survey, request.report)
    recipe = held_recipe(survey)
    if recipe is None:
        refuse_lost_recipe(survey)
    refuse_other_inputs(survey.store, recipe, facts.recipe, request)
    samples, num_left_out = wanted_samples(facts, request)
    planned, trusted = facts.planned, trusted_rows(facts)
    assert planned is not None
    spec = make_spec(recipe, samples)
    if beyond := [shard for shard in sorted(request.rebuild) if not 0 <= shard < spec.num_shards]:
        raise ConfigError(f"{survey.store} has shards [0, {spec.num_shards}); it has no shard {beyond[0]}")
    refuse_lost_withdrawals(survey, samples.digests.withdrawn)
    in_force = planned if planned.is_on_disk and len(survey.texts) >= len(planned.cut.parts) else samples
    kept, tasks, notes = divide_shards(spec, survey, samples.digests, in_force, request)
    work = Work(
        spec=spec,
        plan=samples,
        rows_before=len(planned),
        trusted=trusted,
        plan_files=survey.plan.value.files if survey.plan.value and trusted else (),
        texts={part: each for part, each in survey.texts.items() if part < len(planned.cut.parts)},
        source_version=None if num_left_out else facts.source_version,
        kept=kept,
        tasks=tasks,
        earlier_seal=survey.seal.value,
        has_roll=survey.roll.value is not None,
    )
    return replace(work, notes=(*notes, *metadata_notes(facts, work, num_left_out)))


def decide_planned(facts: Facts, request: BuildRequest) -> Work:
    """Decide the work left of the plan on disk, for ranks and the seal after them; `plan` has checked list and images.

    Raises CacheError if planning has not finished, or if a single-process build has to mend shards first.
    """
    survey = facts.survey
    if survey.build.value and survey.build.value.withdrawing:
        refuse_unfinished_plan(survey.store, CacheError("a withdrawal was stopped"), request)
    if facts.found is None:
        refuse_unfinished_plan(survey.store, survey.spec.problem or survey.plan.problem, request)
    work = decide(facts, request)
    refuse_mending(survey.store, work.shards_to("mend"), request)
    damage = next(damaged_metadata(survey, work.spec), None)
    if damage or work.trusted is None:
        refuse_unfinished_plan(survey.store, damage, request)
    return work


def make_spec(recipe: Recipe, samples: Rows) -> Spec:
    """Make the spec of a cache of these samples; raise ConfigError if no cache can have it."""
    return checked_spec(samples.spec(recipe))


def checked_spec(spec: Spec) -> Spec:
    """Return the spec; raise ConfigError if no cache can have it."""
    if problems := spec_problems(spec):
        raise ConfigError(f"no cache can hold {spec.rows:,} samples of this size: {'; '.join(problems)}")
    return spec


def wanted_samples(facts: Facts, request: BuildRequest) -> tuple[Rows, int]:
    """Return the samples that the cache will hold, and how many new ones are left out; raise StaleError if others."""
    survey, planned, found = facts.survey, facts.planned, facts.found
    if planned is None:
        refuse_lost_list(survey, facts.num_listed)
    lists = (len(planned), facts.num_listed, facts.difference)
    if found is None:
        refuse_other_list(survey.store, *lists, request, has_grown=False)
    num_left_out = facts.num_listed - len(found)
    if num_left_out and request.new_samples == "refuse":
        refuse_other_list(survey.store, *lists, request, has_grown=True)
    return found, num_left_out


def trusted_rows(facts: Facts) -> Rows | None:
    """Return the rows planned before if they are from the plan's files, unless these differ from the sealed ones."""
    plan, seal, planned = facts.survey.plan.value, facts.survey.seal.value, facts.planned
    if plan is None or planned is None or not planned.is_on_disk:
        return None
    if seal is not None and plan.files and seal.spec == planned.spec(facts.recipe) and seal.plan_files != plan.files:
        return None
    return planned


def metadata_notes(facts: Facts, work: Work, num_left_out: int) -> Iterator[str]:
    """Yield notes on the plan, the seal and the other metadata."""
    survey = facts.survey
    if num_left_out:
        yield f"new in the source: {counted(num_left_out, 'sample')}; `precompute build … --extend` adds them"
    if survey.seal.problem:
        yield f"damage found, the seal is made again from the records: {survey.seal.problem}"
    if work.is_extension:
        kept = f"; {counted(len(work.kept), 'shard')} kept" if work.kept else ""
        yield f"extending from {work.rows_before:,} to {counted(work.spec.rows, 'sample')}{kept}"
        return
    for finding in damaged_metadata(survey, work.spec):
        yield f"damage found and mended: {finding}"
    if not work.is_planned:
        yield f"damage found, {PLAN}/ is written again from the source"
    if facts.num_other_texts:
        name = shlex.quote(str(survey.store))
        yield f"the source has other texts now, which `precompute captions {name}` reads; those of before stay"
    if lost := [part for part in range(len(work.spec.parts)) if part not in work.texts]:
        yield f"damage found, the texts of {counted(len(lost), 'part')} are written again from the source"


def damaged_metadata(survey: Survey, spec: Spec) -> Iterator[Finding | Exception]:
    for name, data in shard_format(spec).metadata().items():
        found = survey.metadata.get(name)
        if found is None and (survey.spec.value is not None or name == SPEC_FILE):
            yield Finding(file=name, problem="is missing")
        elif found is not None and found != data:
            yield Finding(file=name, problem="is not what the spec says it should be")
    if survey.build.value is None:
        yield survey.build.problem or Finding(file=BUILD_FILE, problem="is missing")


def divide_shards(
    spec: Spec, survey: Survey, digests: PlanDigests, in_force: Rows, request: BuildRequest
) -> tuple[dict[int, CommitRecord], dict[int, Task], list[str]]:
    """Divide the shards: return the records of those to keep, the tasks of the others, and notes on damage.

    `in_force` has the texts that are encoded; a shard of others, or of samples that were withdrawn since, is replaced.

    A rebuilt shard with the same samples must get the same bytes.
    """
    records, problems, outdated = dict[int, CommitRecord](), dict[int, str](), set[int]()
    text = spec.array.text
    for shard in (shard for shard in survey.shards if shard < spec.num_shards):
        record, problem = usable_record(spec, shard, survey.shards[shard])
        if record and record.content.samples != digests.shards[shard]:
            record, problem = None, problem or f"{commit_file(shard)}: was made for other samples"
        if record and record.content.withdrawn != digests.withdrawn[shard]:
            outdated.add(shard)
        elif record and text and survey.texts:
            texts = encoded_texts_digest(text, in_force.shard(shard, ["id", "conversations"]))
            outdated.update([shard] if texts != record.content.texts else [])
        if record is not None:
            records[shard] = record
        if problem is not None:
            problems[shard] = problem
    allowed = allowed_digests(spec, survey, records)
    for shard, record in records.items():
        if shard not in problems and record.content.digest not in allowed.get(shard, ()):
            problems[shard] = f"{commit_file(shard)}: is not the record that the cache was sealed with"
    again = {*problems, *request.rebuild, *outdated}
    kept = {shard: each for shard, each in records.items() if shard not in again}
    tasks = dict[int, Task]()
    for shard in (shard for shard in range(spec.num_shards) if shard not in kept):
        if shard in outdated:
            tasks[shard] = Task("replace", rejected=records[shard].content.rejected)
        elif shard in survey.shards or shard in allowed:
            tasks[shard] = Task("mend", allowed.get(shard, frozenset()))
        else:
            tasks[shard] = Task("replace" if shard in survey.retracted else "build")
    return kept, tasks, [f"damage found, shard {shard} is built again: {problems[shard]}" for shard in sorted(problems)]


def refuse_lost_withdrawals(survey: Survey, withdrawn: Sequence[int]) -> None:
    """Raise CacheError if the samples count fewer withdrawn ones than a record or the seal: they must not come back."""
    counts = {shard: record.content.withdrawn for shard, record in survey.records.items()}
    if roll := survey.roll.value:
        counts |= dict(enumerate(roll.entries["withdrawn"].tolist()))
    if lost := sorted(shard for shard, count in counts.items() if shard < len(withdrawn) and count > withdrawn[shard]):
        raise CacheError(
            f"{survey.store.where(PLAN)} lacks withdrawals of {counted(len(lost), 'shard')}, the first of shard "
            f"{lost[0]}, which its records count; restore it from a copy, or withdraw these samples again from a copy "
            "of the cache"
        )


def allowed_digests(spec: Spec, survey: Survey, records: Mapping[int, CommitRecord]) -> Mapping[int, frozenset[str]]:
    """Return the digests allowed for rebuilt shards: damage is repaired to the old bytes or not at all.

    The seal's digests count if at least one record matches them or no record is left; otherwise a shard may match its
    record or the seal. While a cache is extended, its seal covers only its first shards.
    """
    recorded = {shard: record.content.digest for shard, record in records.items()}
    seal, roll = survey.seal.value, survey.roll.value
    is_sealed = seal is not None and seal.spec.recipe == spec.recipe and begins_with(spec, seal.spec)
    sealed = {shard: roll.digest(shard) for shard in range(len(roll))} if roll and is_sealed else {}
    if not recorded or any(digest == sealed.get(shard) for shard, digest in recorded.items()):
        return {shard: frozenset([digest]) for shard, digest in (sealed or recorded).items()}
    return {shard: frozenset({digest, sealed.get(shard, digest)}) for shard, digest in recorded.items()}


def begins_with(spec: Spec, sealed: Spec) -> bool:
    """Return whether the spec has the sealed plan, or one that was cut alike and then grew."""
    if spec.rows == sealed.rows:
        return spec == sealed
    is_first = spec.arrays[: len(sealed.arrays)] == sealed.arrays
    is_first &= np.array_equal(spec.array_indices[: sealed.num_shards], sealed.array_indices)
    return is_first and sealed.rows < spec.rows and np.array_equal(spec.bounds[: sealed.num_shards + 1], sealed.bounds)


def certain_bytes(work: Work, max_reject_fraction: float) -> float:
    """Return a lower bound on the new bytes; 0 with a codec, or if the cache already has shards."""
    if work.spec.array.codec != "none" or work.kept or work.shards_to("mend", "replace"):
        return 0.0
    return work.spec.sample_bytes * (1.0 - max_reject_fraction)
