"""What a build has to do, from what was found of the cache and what is asked of it: pure functions, no disk.

A cache is the recipe, the list of samples and the shards. Each stands on disk more than once, so that a loss is made
good by copying: the recipe in the spec, the seal and every record, the list in the plan and the source, what a shard
was in its record and the seal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cache_store.cache.survey import ShardOnDisk, Survey, held_recipe
from cache_store.errors import ConfigError
from cache_store.format.formats import shard_format
from cache_store.format.names import BUILD_FILE, PLAN_FILE, SPEC_FILE, commit_file
from cache_store.format.plan import PlanDigests
from cache_store.format.schema import CommitRecord, Recipe, Seal, Spec
from cache_store.refusal import counted
from cache_store.verify.findings import Finding
from cache_store.verify.record import usable_record
from precompute.rerun.refusals import refuse_lost_recipe, refuse_other_inputs, refuse_other_report
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import Rows
from precompute.rerun.sample_list import SampleList, arrange
from precompute.rerun.spec import possible_spec

AllowedDigests = dict[int, frozenset[str]]
"""By shard, digests of the contents that it may have; a shard of which nothing sound is left may have any."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What config and source ask for."""

    samples: Rows
    """Of the source: as it was listed just now, or of the cache's own plan, where that still is its list."""
    recipe: Recipe
    source_version: str | None = None
    """From before the source was listed; None where it has to be listed each time."""
    passed_over: str = ""
    """What the source holds beside samples, if it was listed just now."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is left to do."""

    spec: Spec
    plan: Rows | None
    """Every sample that the cache is to hold, as the source has it now; None once that is on disk."""
    rows_before: int = 0
    """Rows that the cache was planned with."""
    trusted: Rows | None = None
    """Those rows in the plan file, where its fingerprints can be trusted."""
    writes_plan: bool = True
    source_version: str | None = None
    """Of the source whose samples these are, all of them; None where it has to be listed each time."""
    kept: Mapping[int, CommitRecord] = field(default_factory=dict)
    """Records of the shards that need no work."""
    allowed_digests: AllowedDigests = field(default_factory=dict)
    earlier_seal: Seal | None = None
    notes: tuple[str, ...] = ()
    """Damage that is mended, and what else a person should know."""
    recovered: Mapping[int, int] = field(default_factory=dict)
    """Shards with rejected samples that succeed now, and how many each had rejected."""

    @property
    def grows(self) -> bool:
        return 0 < self.rows_before < self.spec.rows

    @property
    def samples_differ(self) -> bool:
        """Whether the cache becomes another one, on purpose."""
        return self.grows or bool(self.recovered)

    @property
    def open_shard(self) -> int | None:
        """The shard, if there is one, that new rows fill up: the last one so far."""
        full, open_rows = divmod(self.rows_before, self.spec.samples_per_shard)
        return full if self.grows and open_rows else None

    @property
    def goes_by_own_plan(self) -> bool:
        """Whether the source was not listed just now, since the cache's plan still is its list."""
        return self.plan is not None and self.plan.on_disk

    @property
    def to_build(self) -> list[int]:
        return [shard for shard in range(self.spec.num_shards) if shard not in self.kept]

    def planned(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """A shard's rows, as the source has them now."""
        assert self.plan is not None
        return self.plan.shard(shard, columns)

    def to_write(self, shard: int) -> pa.Table:
        """A shard's rows, with the fingerprints of the images that were encoded."""
        rows = self.planned(shard)
        before = self.trusted.shard(shard, ["fingerprint"])["fingerprint"].chunks if self.trusted else []
        new = rows["fingerprint"].slice(sum(map(len, before)))
        fingerprints = pa.chunked_array([*before, *new.chunks], pa.string()).combine_chunks()
        return rows.set_column(rows.column_names.index("fingerprint"), "fingerprint", fingerprints)

    def without_plan(self) -> "Work":
        """The work once the plan is on disk, so that nothing of it grows with the data set."""
        return replace(self, plan=None, trusted=None)

    def recovering(self, shards: Mapping[int, int]) -> "Work":
        """The work with these shards built again, to whatever they come out as."""
        return replace(
            self,
            recovered=shards,
            kept={shard: record for shard, record in self.kept.items() if shard not in shards},
            allowed_digests={shard: each for shard, each in self.allowed_digests.items() if shard not in shards},
        )


def decide(survey: Survey, wanted: Wanted, request: BuildRequest) -> Work:
    """The work; StaleError where the cache was made from other inputs, ConfigError for what no cache can be."""
    if not survey.has_cache:
        spec = possible_spec(wanted.recipe, len(wanted.samples), wanted.samples.digests.whole)
        return Work(spec=spec, plan=wanted.samples, source_version=wanted.source_version)
    survey.raise_unreadable()
    refuse_other_report(survey, request.report)
    recipe = held_recipe(survey)
    if recipe is None:
        refuse_lost_recipe(survey)
    refuse_other_inputs(survey.store, recipe, wanted.recipe, request)
    samples = arrange(survey, recipe, wanted.samples, request)
    spec = possible_spec(recipe, len(samples.wanted), samples.wanted.digests.whole)
    if beyond := [shard for shard in sorted(request.rebuild) if not 0 <= shard < spec.num_shards]:
        raise ConfigError(f"{survey.store} has shards [0, {spec.num_shards}); it has no shard {beyond[0]}")
    trusted = trusted_rows(survey, recipe, samples)
    work = Work(
        spec=spec,
        plan=samples.wanted,
        rows_before=len(samples.planned),
        trusted=trusted,
        writes_plan=trusted is None or samples.has_begun_to_grow or spec.rows > len(samples.planned),
        source_version=None if samples.left_out else wanted.source_version,
        earlier_seal=survey.seal.value,
    )
    work = with_shards(work, survey, samples.wanted.digests, request)
    return replace(work, notes=(*work.notes, *notes_on_metadata(survey, work, samples)))


def trusted_rows(survey: Survey, recipe: Recipe, samples: SampleList) -> Rows | None:
    """The rows planned before, where the plan file is the sealed one, if any is, or that of a begun extension."""
    plan, seal = survey.plan.value, survey.seal.value
    if plan is None or not samples.planned.on_disk:
        return None
    is_sealed = seal is not None and seal.spec_digest == samples.planned.spec(recipe).digest
    if seal is not None and is_sealed and not samples.has_begun_to_grow and seal.plan_file != plan.file:
        return None
    return samples.planned


def notes_on_metadata(survey: Survey, work: Work, samples: SampleList) -> Iterator[str]:
    """What becomes of the plan and of the files that spec and config determine."""
    if samples.left_out:
        yield f"new in the source: {counted(samples.left_out, 'sample')}; `precompute build … --extend` adds them"
    if survey.seal.problem:
        yield f"damage found, the seal is made again from the records: {survey.seal.problem}"
    if work.grows:
        before, shard = work.rows_before, work.open_shard
        full = before // work.spec.samples_per_shard
        kept = f"; shards [0, {full:,}) are full and kept" if full else ""
        again = "" if shard is None else f"; shard {shard}, partly filled so far, is written again"
        yield f"extending from {before:,} to {counted(work.spec.rows, 'sample')}{kept}{again}"
        return
    for finding in damaged_metadata(survey, work.spec):
        yield f"damage found and mended: {finding}"
    if samples.has_begun_to_grow:
        yield f"an extension that had only begun is undone: {PLAN_FILE} is written again"
    elif work.writes_plan:
        yield f"damage found, {PLAN_FILE} is written again from the source"


def damaged_metadata(survey: Survey, spec: Spec) -> Iterator[Finding | Exception]:
    for name, data in shard_format(spec).metadata().items():
        found = survey.metadata.get(name)
        if found is None and (survey.spec.value is not None or name == SPEC_FILE):
            yield Finding(file=name, problem="is missing")
        elif found is not None and found != data:
            yield Finding(file=name, problem="is not what the spec says it should be")
    if survey.build.value is None:
        yield survey.build.problem or Finding(file=BUILD_FILE, problem="is missing")


def with_shards(work: Work, survey: Survey, digests: PlanDigests, request: BuildRequest) -> Work:
    """Sort the shards; one whose samples stay the same is held to what it was, by a build as by a repair."""
    shards = [shard for shard in survey.shards if shard < work.spec.num_shards and shard != work.open_shard]
    records, problems = dict[int, CommitRecord](), dict[int, str]()
    for shard in shards:
        record, problem = planned_record(work.spec, digests, shard, survey.shards[shard])
        if record is not None:
            records[shard] = record
        if problem is not None:
            problems[shard] = problem
    allowed = allowed_digests(work.spec, survey.seal.value, records)
    for shard, record in records.items():
        if shard not in problems and record.content.digest not in allowed.get(shard, ()):
            problems[shard] = str(record_finding(shard, "is not the record that the cache was sealed with"))
    kept = {shard: each for shard, each in records.items() if shard not in problems and shard not in request.rebuild}
    notes = tuple(f"damage found, shard {shard} is built again: {problems[shard]}" for shard in sorted(problems))
    return replace(work, kept=kept, allowed_digests=allowed, notes=notes)


def planned_record(
    spec: Spec, digests: PlanDigests, shard: int, on_disk: ShardOnDisk
) -> tuple[CommitRecord | None, str | None]:
    """A usable record of the plan's samples, and why the shard cannot be kept."""
    record, problem = usable_record(spec, shard, on_disk)
    if record and record.content.plan_digest != digests.shards[shard]:
        return None, problem or str(record_finding(shard, "was made for other samples"))
    return record, problem


def record_finding(shard: int, problem: str) -> Finding:
    return Finding(shard=shard, file=commit_file(shard), problem=problem)


def allowed_digests(spec: Spec, seal: Seal | None, records: Mapping[int, CommitRecord]) -> AllowedDigests:
    """What shards that are built again may come out as: damage is mended to the bytes that were, or not at all.

    The seal's digests if at least one shard matches them; else a shard may be what either says.
    """
    recorded = {shard: record.content.digest for shard, record in records.items()}
    sealed = dict(enumerate(seal.commits)) if seal and seal.spec_digest == spec.digest else {}
    if not recorded or any(digest == sealed.get(shard) for shard, digest in recorded.items()):
        return {shard: frozenset([digest]) for shard, digest in (sealed or recorded).items()}
    return {shard: frozenset({digest, sealed.get(shard, digest)}) for shard, digest in recorded.items()}
