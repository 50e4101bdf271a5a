"""Saying whether every byte of a cache is right, and naming what is not.

`quick` reads records and sizes: seconds for thousands of shards. `full` reads every byte: each file's SHA-256, each
sample's crc32c and values, each id against the plan. A subset is read in full, the rest quickly.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cache_store.errors import CacheError, NewerFormatError
from cache_store.findings import LEFTOVER, STRAY, Finding, Level, Report, in_reading_order
from cache_store.formats import shard_format
from cache_store.metadata import has_cache, read_build, read_commit, read_seal, read_spec
from cache_store.plan import PlanFile
from cache_store.processes import spread
from cache_store.publish import SCRATCH_SUFFIX
from cache_store.schema import (
    BUILD_FILE,
    PLAN_FILE,
    SEAL_FILE,
    SPEC_FILE,
    CommitContent,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
    samples_file,
)
from cache_store.seal import cache_identity, make_seal
from cache_store.subset import Subset
from cache_store.verify_shard import CheckedShard, ShardTask, ShardVerifier, file_finding, unreadable

__all__ = ["Finding", "Level", "Report", "verify"]

FLOAT_TOLERANCE = 1e-6


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
    if seal is not None and seal.spec_digest != spec.digest and not is_borne_out(root, spec):
        return report_of_spec(root, level, subset, "is not the spec that seal, plan and records were made with")
    findings += [*metadata_findings(root, spec), *stray_findings(root, spec)]
    tasks: list[PlanTask | ShardTask] = [PlanTask(level=level), *shard_tasks(spec, level, subset)]
    results = {}
    for position, result in spread(partial(Verifier, root, spec, seal), tasks, jobs):
        results[position] = result
        findings += result.findings
        if isinstance(result, CheckedShard):
            progress(result)
    checked = [each for _, each in sorted(results.items()) if isinstance(each, CheckedShard)]
    if seal is not None:
        findings += seal_findings(spec, seal, checked, {finding.file for finding in findings})
    return report_of(root, level, spec, subset, seal, checked, findings)


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """The plan to check, while shards are."""

    level: Level


class CheckedPlan(NamedTuple):
    findings: tuple[Finding, ...]


class Verifier:
    """What one process does: shards and the plan."""

    def __init__(self, root: Path, spec: Spec, seal: Seal | None) -> None:
        self._root, self._spec, self._seal = root, spec, seal
        self._check_shard = ShardVerifier(root, spec, seal)

    def __call__(self, task: PlanTask | ShardTask) -> CheckedPlan | CheckedShard:
        if isinstance(task, ShardTask):
            return self._check_shard(task)
        return CheckedPlan(tuple(plan_findings(self._root, self._spec, self._seal, task.level)))


def shard_tasks(spec: Spec, level: Level, subset: Subset | None) -> list[ShardTask]:
    shards = range(spec.num_shards)
    levels: list[Level] = [level if subset is None or shard in subset else "quick" for shard in shards]
    return [
        ShardTask(array=array, shard=shard, level=each)
        for array in spec.arrays
        for shard, each in zip(shards, levels, strict=True)
    ]


def is_borne_out(root: Path, spec: Spec) -> bool:
    """Whether plan and records speak for the spec, where the seal speaks against it."""
    try:
        plan = PlanFile(root)
        if plan.num_rows != spec.rows or plan.digest() != spec.plan_digest:
            return False
    except CacheError:
        pass  # then it says nothing
    records = (readable_record(root, array, shard) for array in spec.arrays for shard in range(spec.num_shards))
    first = next(filter(None, records), None)
    return first is not None and first.content.recipe_digest == spec.recipe_digest


def readable_record(root: Path, array: str, shard: int) -> CommitRecord | None:
    try:
        return read_commit(root, array, shard)
    except (CacheError, OSError):
        return None


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
        findings.append(Finding(file=SEAL_FILE, problem=unreadable(error, root / SEAL_FILE)))
    try:
        read_build(root)
    except (CacheError, OSError) as error:
        findings.append(Finding(file=BUILD_FILE, problem=unreadable(error, root / BUILD_FILE)))
    return seal, findings


def metadata_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        try:
            if (root / name).read_bytes() != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except (FileNotFoundError, NotADirectoryError):
            yield Finding(file=name, problem="is missing")
        except OSError as error:
            yield Finding(file=name, problem=unreadable(error, root / name))


def stray_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    """What lies in the cache's folders and is no file of a cache, scratch files of a build that died among them."""
    shards = range(spec.num_shards)
    layout = shard_format(spec)
    known = {*layout.metadata(spec), *map(samples_file, shards)}
    for array in spec.arrays:
        known.update(commit_file(array, shard) for shard in shards)
        known.update(layout.shard_file(array, shard) for shard in shards)
    for path in sorted(root.glob(f".*{SCRATCH_SUFFIX}")):
        yield Finding(file=path.name, problem=LEFTOVER)
    folders = {name.rpartition("/")[0] for name in known}
    for top in sorted({name.partition("/")[0] for name in folders if name}):
        yield from strays_below(root, top, known, folders)


def strays_below(root: Path, folder: str, known: set[str], folders: set[str]) -> Iterator[Finding]:
    """Names as strings throughout: a large cache has hundreds of thousands of them."""
    try:
        entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return  # the files that should be in it are missed one by one
    for entry in entries:
        name = f"{folder}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            inner = [*strays_below(root, name, known, folders)]
            empty = name not in folders and not any(each.startswith(f"{name}/") for each in folders)
            yield from inner or ([Finding(file=name, problem=STRAY)] if empty else [])
        elif name not in known:
            yield Finding(file=name, problem=LEFTOVER if name.endswith(SCRATCH_SUFFIX) else STRAY)


def plan_findings(root: Path, spec: Spec, seal: Seal | None, level: Level) -> Iterator[Finding]:
    """Its hash at every level, since it is one file; full also whether it is the spec's plan."""
    try:
        plan = PlanFile(root)
        if seal is not None and (finding := file_finding(root, seal.plan_file, "full")):
            yield finding
            if plan.digest() == spec.plan_digest:
                yield Finding(file=SEAL_FILE, problem="or the seal is wrong about it: the plan's rows are the spec's")
        elif level == "full" and not (plan.num_shards == spec.num_shards and plan.digest() == spec.plan_digest):
            yield Finding(file=PLAN_FILE, problem="is another plan than the spec's")
    except (CacheError, OSError) as error:
        yield Finding(file=PLAN_FILE, problem=unreadable(error, root / PLAN_FILE))


def seal_findings(spec: Spec, seal: Seal, checked: Sequence[CheckedShard], damaged: set[str]) -> Iterator[Finding]:
    """Whether the seal is the roll-up of the commit records; a record that it was not made from is named."""
    if seal.spec_digest != spec.digest:
        yield Finding(file=SEAL_FILE, problem="is the seal of another spec")
        return
    others = [*other_records(seal, checked)]
    if len(others) == len(checked) > 1:
        yield Finding(file=SEAL_FILE, problem="is the seal of none of the commit records")
        return
    yield from (finding for finding in others if finding.file not in damaged)
    records = {commit_file(each.task.array, each.task.shard) for each in checked}
    if others or records & damaged:
        return  # what it should be cannot be told
    expected = make_seal(spec, contents_of(checked), seal.plan_file)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the roll-up of the commit records")


def contents_of(checked: Sequence[CheckedShard]) -> dict[str, list[CommitContent]]:
    """By array, in order of shards; of shards without a record, nothing."""
    contents: dict[str, list[CommitContent]] = {each.task.array: [] for each in checked}
    for each in checked:
        contents[each.task.array] += [each.content] if each.content else []
    return contents


def other_records(seal: Seal, checked: Sequence[CheckedShard]) -> Iterator[Finding]:
    """Readable records that are not those the cache was sealed with; none where the seal's own list is at fault."""
    if cache_identity(contents_of(checked)) == seal.identity:
        return
    for each in checked:
        array, shard = each.task.array, each.task.shard
        digests = seal.commits.get(array, ())
        if each.digest is not None and (shard >= len(digests) or digests[shard] != each.digest):
            problem = "is not the record that the cache was sealed with"
            yield Finding(shard=shard, file=commit_file(array, shard), problem=problem)


def nearly_equal(expected: Any, found: Any) -> bool:
    """Equal, floats to rounding: another machine's linear algebra may differ in the last bits of the preview map.

    The seal's own sha256 has been checked when it was read.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(nearly_equal(expected[name], found[name]) for name in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(nearly_equal, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return bool(expected == found)
