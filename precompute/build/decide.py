"""Decide what a build has to do, from what the cache states and the samples it shall have: pure, touching no disk.

Each fact is on disk more than once, so a loss is repaired by copying: the recipe in spec, seal and records; the list in
plan and source; a shard's digest in its record and the seal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import spec_problems
from cache_store.cache.survey import Survey
from cache_store.errors import CacheError, ConfigError
from cache_store.format.formats import shard_format
from cache_store.format.layout import PLAN, SPEC_FILE, commit_file, part_file
from cache_store.format.plan import encoded_texts_digest
from cache_store.format.schema import CommitRecord, FileRecord, Seal, Spec
from cache_store.messages import counted
from cache_store.verify.record import usable_record
from precompute.build.request import BuildRequest
from precompute.build.stated import Stated

State = Literal["build", "mend", "replace"]
"""`build`: never committed; any content. `mend`: committed or sealed; the same content again, if its digest is known.
`replace`: a committed shard gets other content, because rejected samples can be decoded now.
"""


class Task(NamedTuple):
    """The work on a shard that is not kept."""

    state: State
    digest: str = ""
    """The content digest that a mended shard must have; empty if none is known."""
    rejected: int = 0
    """Rejected samples of a replaced shard, before."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work left to do: every shard is kept or has a task."""

    spec: Spec
    plan_files: tuple[FileRecord, ...] = ()
    """The parts of the plan, once they are on disk."""
    rows_before: int = 0
    """Rows that the cache was planned with."""
    kept: Mapping[int, CommitRecord] = field(default_factory=dict)
    """Records of the shards that need no work."""
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """The other shards, in order."""
    earlier_seal: Seal | None = None
    is_rolled_up: bool = False
    """Whether shards.bin and rejected.parquet are as the earlier seal names them."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    damage: tuple[str, ...] = ()
    """What is wrong with each shard that has to be mended."""
    num_retried: int = 0
    """Rejected samples that were tried again."""

    @property
    def is_extension(self) -> bool:
        return 0 < self.rows_before < self.spec.rows

    @property
    def to_build(self) -> list[int]:
        return [*self.tasks]

    def shards_to(self, *states: State) -> list[int]:
        return [shard for shard, task in self.tasks.items() if task.state in states]

    @property
    def digests(self) -> dict[int, str]:
        return {shard: task.digest for shard, task in self.tasks.items() if task.digest}

    def with_recovered(self, num_retried: int, shards: Mapping[int, int]) -> "Work":
        tasks = {**self.tasks, **{shard: Task("replace", rejected=count) for shard, count in shards.items()}}
        kept = {shard: record for shard, record in self.kept.items() if shard not in shards}
        return replace(self, num_retried=num_retried, kept=kept, tasks=dict(sorted(tasks.items())))


FactsOf = Callable[[int], tuple[str, int]]
"""Returns the digest of a shard's samples, and how many of them are withdrawn."""

TextsOf = Callable[[int], pa.Table]
"""Reads id and conversations of a shard's rows, as they are encoded."""


def decide(
    stated: Stated,
    spec: Spec,
    facts_of: FactsOf,
    texts_of: TextsOf,
    request: BuildRequest,
    shards: Sequence[int] | None = None,
) -> Work:
    """Decide the work on a cache that shall have these samples, or on some of its shards; ConfigError if none can."""
    survey = stated.survey
    refuse_impossible(spec)
    if beyond := [shard for shard in sorted(request.rebuild) if not 0 <= shard < spec.num_shards]:
        raise ConfigError(f"{survey.store} has shards [0, {spec.num_shards}); it has no shard {beyond[0]}")
    shards = range(spec.num_shards) if shards is None else shards
    refuse_lost_withdrawals(survey, shards, facts_of)
    kept, tasks, damage = divide_shards(spec, survey, shards, facts_of, texts_of, request)
    return Work(
        spec=spec,
        rows_before=stated.spec.rows if stated.spec else 0,
        kept=kept,
        tasks=tasks,
        earlier_seal=survey.seal.value,
        is_rolled_up=bool(survey.roll.value and survey.rejected.value),
        damage=tuple(damage),
    )


def refuse_impossible(spec: Spec) -> None:
    if problems := spec_problems(spec):
        raise ConfigError(f"no cache can hold {spec.rows:,} samples of this size: {'; '.join(problems)}")


def damaged_metadata(stated: Stated) -> Iterator[str]:
    """Yield what is damaged besides shards; what follows from the spec counts once the cache is sealed."""
    survey, spec = stated.survey, stated.spec
    if spec is None:
        return  # its loss is refused, once the source was listed
    for name, data in shard_format(spec).metadata().items():
        found = survey.metadata.get(name)
        if name == SPEC_FILE and survey.spec.problem:
            yield str(survey.spec.problem)
        elif found != data and (name == SPEC_FILE or (survey.spec.value and survey.seal.value)):
            yield f"{name} {'is missing' if found is None else 'is not what the spec says it should be'}"
    yield from (str(each.problem) for each in (survey.seal, survey.roll, survey.rejected) if each.problem)
    yield from (f"{part_file(part)} is lost or is not the planned one" for part in sorted(stated.lost))
    yield from (f"the texts of part {part} are lost or are not those in force" for part in sorted(stated.lost_texts))


def divide_shards(
    spec: Spec, survey: Survey, shards: Sequence[int], facts_of: FactsOf, texts_of: TextsOf, request: BuildRequest
) -> tuple[dict[int, CommitRecord], dict[int, Task], list[str]]:
    """Divide the shards: return the records of those to keep, the tasks of the others, and notes on damage.

    A shard of other texts, or of samples that were withdrawn since, is replaced; with the same samples, a rebuilt shard
    must get the same bytes.
    """
    records, problems, outdated = dict[int, CommitRecord](), dict[int, str](), set[int]()
    text = spec.array.text
    for shard in (shard for shard in shards if shard in survey.shards):
        record, problem = usable_record(spec, shard, survey.shards[shard])
        samples, withdrawn = facts_of(shard)
        if record and record.content.samples != samples:
            record, problem = None, problem or f"{commit_file(shard)}: was made for other samples"
        if (record and record.content.withdrawn != withdrawn) or (
            record and text and encoded_texts_digest(text, texts_of(shard)) != record.content.texts
        ):
            outdated.add(shard)
        if record is not None:
            records[shard] = record
        if problem is not None:
            problems[shard] = problem
    digests = known_digests(spec, survey, records)
    for shard, record in records.items():
        if shard not in problems and record.content.digest != digests[shard]:
            problems[shard] = f"{commit_file(shard)}: is not the record that the cache was sealed with"
    again = {*problems, *request.rebuild, *outdated}
    kept = {shard: each for shard, each in records.items() if shard not in again}
    tasks = dict[int, Task]()
    for shard in (shard for shard in shards if shard not in kept):
        if shard in outdated:
            tasks[shard] = Task("replace", rejected=records[shard].content.rejected)
        elif shard in survey.shards or shard in digests:
            tasks[shard] = Task("mend", digests.get(shard, ""))
        else:
            tasks[shard] = Task("build")
    lost = [shard for shard, task in tasks.items() if task.state == "mend" and shard not in request.rebuild]
    return kept, tasks, [f"shard {shard}: {problems.get(shard, 'its record is missing')}" for shard in lost]


def refuse_lost_withdrawals(survey: Survey, shards: Sequence[int], facts_of: FactsOf) -> None:
    """Raise CacheError if the samples count fewer withdrawn ones than a record or the seal: they must not come back."""
    counts = {shard: record.content.withdrawn for shard, record in survey.records.items()}
    if roll := survey.roll.value:
        counts |= dict(enumerate(roll.entries["withdrawn"].tolist()))
    if lost := [shard for shard in shards if counts.get(shard, 0) and counts[shard] > facts_of(shard)[1]]:
        raise CacheError(
            f"{survey.store.where(PLAN)} lacks withdrawals of {counted(len(lost), 'shard')}, the first of shard "
            f"{lost[0]}, which its records count; restore it from a copy, or withdraw these samples again from a copy "
            "of the cache"
        )


def known_digests(spec: Spec, survey: Survey, records: Mapping[int, CommitRecord]) -> Mapping[int, str]:
    """Return the digests of shards, as sealed, else as recorded, else "": damage is repaired to the old bytes or not.

    While a cache is extended, its seal covers only its first shards.
    """
    seal, roll = survey.seal.value, survey.roll.value
    recorded = {shard: record.content.digest for shard, record in records.items()}
    if not (seal and seal.spec.recipe == spec.recipe and begins_with(spec, seal.spec)):
        return recorded
    sealed = {shard: roll.digest(shard) for shard in range(len(roll))} if roll else {}
    return {**dict.fromkeys(range(seal.spec.num_shards), ""), **recorded, **sealed}


def begins_with(spec: Spec, sealed: Spec) -> bool:
    count = sealed.num_shards
    return spec.parts[: len(sealed.parts)] == sealed.parts and np.array_equal(spec.bounds[: count + 1], sealed.bounds)
