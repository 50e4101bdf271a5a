"""Saying whether every byte of a cache is right, and naming what is not.

`quick` reads records and sizes: seconds for thousands of shards. `full` reads every byte: each file's SHA-256, each
sample's crc32c and values, each id against the plan. A subset is read in full, the rest quickly.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cache_store.errors import CacheError, NewerFormatError
from cache_store.findings import UNSEALED, Finding, Level, Report, in_reading_order
from cache_store.formats import shard_format
from cache_store.metadata import has_cache, read_build, read_commit, read_seal, read_spec
from cache_store.plan import PlanFile
from cache_store.processes import spread
from cache_store.publish import file_sha256
from cache_store.regular_file import read_regular
from cache_store.schema import (
    BUILD_FILE,
    PLAN_FILE,
    SEAL_FILE,
    SPEC_FILE,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
)
from cache_store.strays import stray_findings
from cache_store.subset import Subset
from cache_store.verify_seal import seal_findings
from cache_store.verify_shard import CheckedShard, ShardTask, ShardVerifier, file_finding, unreadable

__all__ = ["Finding", "Level", "Report", "verify"]


def ignore(checked: CheckedShard) -> None:
    pass


def verify(
    path: str | Path,
    level: Level = "quick",
    *,
    subset: Subset | None = None,
    jobs: int = 1,
    progress: Callable[[CheckedShard], object] = ignore,
) -> Report:
    """Check a cache, with so many processes; the report is the same for any; `progress` hears of every shard.

    Shards outside the subset are checked at level quick. CacheError only where there is no cache to check.
    """
    root = Path(path).expanduser()
    try:
        spec = read_spec(root)
    except (CacheError, OSError) as error:
        if isinstance(error, NewerFormatError) or not has_cache(root):
            raise
        return report_of_spec(root, level, subset, unreadable(error, root / SPEC_FILE))
    seal, findings = read_seal_and_build(root)
    if is_contradicted(root, spec, seal):
        return report_of_spec(root, level, subset, "is not the spec that records, seal and plan were made with")
    findings += [*metadata_findings(root, spec), *stray_findings(root, spec)]
    shards = shard_tasks(spec, level, subset)
    tasks: list[PlanTask | ShardTask] = [plan_task(shards), *shards]
    results: dict[int, CheckedShard | CheckedPlan] = {}
    for position, result in spread(partial(Verifier, root, spec, seal), tasks, jobs):
        results[position] = result
        findings += result.findings
        if isinstance(result, CheckedShard):
            progress(result)
    checked = [each for _, each in sorted(results.items()) if isinstance(each, CheckedShard)]
    plan = results[0]
    assert isinstance(plan, CheckedPlan)
    findings += plan.compare(checked)
    if seal is not None:
        findings += seal_findings(spec, seal, checked, {finding.file for finding in findings})
    return report_of(root, level, spec, subset, seal, checked, findings)


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """The plan to check, while shards are."""

    shards: frozenset[int]
    """Whose rows to look at."""
    whole: bool
    """All of them, so that the plan can be compared with the spec."""


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """What the check of the plan gave."""

    findings: tuple[Finding, ...] = ()
    digests: dict[int, str] = field(default_factory=dict)
    """Of the shards' rows, where the plan is sound."""

    def compare(self, checked: Iterable[CheckedShard]) -> Iterator[Finding]:
        """Commit records that were made for other rows."""
        for each in checked:
            array, shard = each.task.array, each.task.shard
            if each.content and self.digests.get(shard, each.content.plan_digest) != each.content.plan_digest:
                problem = "was made for other samples than the plan's"
                yield Finding(shard=shard, file=commit_file(array, shard), problem=problem)


class Verifier:
    """What one process does: shards and the plan."""

    def __init__(self, root: Path, spec: Spec, seal: Seal | None) -> None:
        self._root, self._spec, self._seal = root, spec, seal
        self._check_shard = ShardVerifier(root, spec, seal)

    def __call__(self, task: PlanTask | ShardTask) -> CheckedPlan | CheckedShard:
        if isinstance(task, ShardTask):
            return self._check_shard(task)
        return check_plan(self._root, self._spec, self._seal, task)


def plan_task(tasks: Sequence[ShardTask]) -> PlanTask:
    full = [task.shard for task in tasks if task.level == "full"]
    return PlanTask(shards=frozenset(full), whole=len(full) == len(tasks))


def shard_tasks(spec: Spec, level: Level, subset: Subset | None) -> list[ShardTask]:
    shards = range(spec.num_shards)
    levels: list[Level] = [level if subset is None or shard in subset else "quick" for shard in shards]
    return [
        ShardTask(array=array, shard=shard, level=each)
        for array in spec.arrays
        for shard, each in zip(shards, levels, strict=True)
    ]


def is_contradicted(root: Path, spec: Spec, seal: Seal | None) -> bool:
    """Whether the rest of the cache agrees on another spec, which is then at fault itself."""
    if seal is not None:
        return seal.spec_digest != spec.digest and not is_borne_out(root, spec)
    recipes = [record.content.recipe_digest for record in readable_records(root, spec)]
    return len(recipes) > 1 == len({*recipes}) and recipes[0] != spec.recipe_digest


def is_borne_out(root: Path, spec: Spec) -> bool:
    """Whether plan and records speak for the spec, where the seal speaks against it."""
    try:
        plan = PlanFile(root)
        if plan.num_rows != spec.rows or plan.digests()[0] != spec.plan_digest:
            return False
    except CacheError:
        pass  # then it says nothing
    first = next(readable_records(root, spec), None)
    return first is not None and first.content.recipe_digest == spec.recipe_digest


def readable_records(root: Path, spec: Spec) -> Iterator[CommitRecord]:
    for array in spec.arrays:
        for shard in range(spec.num_shards):
            with contextlib.suppress(CacheError, OSError):
                if record := read_commit(root, array, shard):
                    yield record


def report_of_spec(root: Path, level: Level, subset: Subset | None, problem: str) -> Report:
    """Without a spec nothing else can be checked, and nothing else is to blame."""
    return report_of(root, level, None, subset, None, [], [Finding(file=SPEC_FILE, problem=problem)])


def report_of(
    root: Path,
    level: Level,
    spec: Spec | None,
    subset: Subset | None,
    seal: Seal | None,
    checked: Sequence[CheckedShard],
    findings: Iterable[Finding],
) -> Report:
    """The report of what was checked at the level asked for."""
    covered = [each for each in checked if subset is None or each.task.shard in subset]
    samples = {each.task.shard: each.content.cached for each in covered if each.content}
    return Report(
        cache=str(root),
        level=level,
        subset=subset.name if subset else None,
        identity=seal.identity if seal else None,
        shards=spec.num_shards if spec else 0,
        covered=len({each.task.shard for each in covered}),
        samples=sum(samples.values()),
        bytes=sum(each.bytes for each in covered),
        findings=tuple(sorted(findings, key=in_reading_order)),
    )


def read_seal_and_build(root: Path) -> tuple[Seal | None, list[Finding]]:
    """The seal, where it is sound, and what is wrong with the two records of the whole cache."""
    seal, findings = None, []
    try:
        seal = read_seal(root)
    except (CacheError, OSError) as error:
        problem = unreadable(error, root / SEAL_FILE) if os.path.lexists(root / SEAL_FILE) else UNSEALED
        findings.append(Finding(file=SEAL_FILE, problem=problem))
    try:
        read_build(root)
    except (CacheError, OSError) as error:
        findings.append(Finding(file=BUILD_FILE, problem=unreadable(error, root / BUILD_FILE)))
    return seal, findings


def metadata_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        try:
            if read_regular(root / name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except (FileNotFoundError, NotADirectoryError):
            yield Finding(file=name, problem="is missing")
        except (CacheError, OSError) as error:
            yield Finding(file=name, problem=unreadable(error, root / name))


def check_plan(root: Path, spec: Spec, seal: Seal | None, task: PlanTask) -> CheckedPlan:
    """Its hash at every level, since it is one file; in full also its rows."""
    try:
        plan = PlanFile(root)
        if seal is not None and (finding := file_finding(root, seal.plan_file, "full")):
            return CheckedPlan(findings=tuple(plan_or_seal(root, plan, spec, finding)))
        if not task.whole:
            return CheckedPlan(digests={shard: plan.shard_digest(shard) for shard in sorted(task.shards)})
        digest, digests = plan.digests()
        if (plan.num_shards, digest) == (spec.num_shards, spec.plan_digest):
            return CheckedPlan(digests=digests)
        problem = "is another plan than the spec's"
    except (CacheError, OSError) as error:
        problem = unreadable(error, root / PLAN_FILE)
    return CheckedPlan(findings=(Finding(file=PLAN_FILE, problem=problem),))


def plan_or_seal(root: Path, plan: PlanFile, spec: Spec, finding: Finding) -> Iterator[Finding]:
    """The plan is not the file that the seal names; the seal may be wrong where the plan contradicts itself nowhere.

    That is, where it has the spec's rows and is, to the bit, what is written for them.
    """
    if finding.file != PLAN_FILE:
        yield Finding(file=SEAL_FILE, problem=f"names {finding.file} as the plan")
        return
    yield finding
    if plan.digests()[0] == spec.plan_digest and plan.sha256_as_written() == file_sha256(root / PLAN_FILE):
        yield Finding(file=SEAL_FILE, problem="or the seal is wrong about the plan, which is as it is written")
