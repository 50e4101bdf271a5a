"""Saying whether every byte of a cache is right, and naming what is not.

`quick` reads records and sizes: seconds for thousands of shards. `full` reads every byte: each file's SHA-256, each
sample's crc32c and values, each id against the plan.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cache_store.errors import CacheError
from cache_store.findings import Finding, Level, Report
from cache_store.formats import shard_format
from cache_store.metadata import read_build, read_seal, read_spec
from cache_store.plan import PlanFile, plan_digest, read_plan
from cache_store.publish import SCRATCH_SUFFIX
from cache_store.schema import (
    BUILD_FILE,
    PLAN_FILE,
    SEAL_FILE,
    CommitContent,
    Seal,
    Spec,
    commit_file,
    samples_file,
)
from cache_store.seal import make_seal
from cache_store.verify_shard import ShardVerifier, file_finding

__all__ = ["Finding", "Level", "Report", "verify"]

FLOAT_TOLERANCE = 1e-6


def verify(path: str | Path, level: Level = "quick", progress: Callable[[int], object] = lambda shard: None) -> Report:
    """Check a cache; `progress` hears of every shard done. CacheError only where there is no cache to check."""
    root = Path(path)
    spec = read_spec(root)
    seal, findings = read_seal_and_build(root)
    findings += [*metadata_findings(root, spec), *stray_findings(root, spec)]
    plan, found = check_plan(root, spec, seal, level)
    findings += found
    contents: dict[str, list[CommitContent]] = {}
    for array in spec.arrays:
        contents[array] = []
        verifier = ShardVerifier(root, spec, array, level, plan)
        for shard in range(spec.num_shards):
            content, found = verifier.check(shard)
            findings += found
            contents[array] += [content] if content else []
            progress(shard)
    if seal is not None and not any(finding.file.startswith(("commits/", PLAN_FILE)) for finding in findings):
        findings += seal_findings(root, spec, seal, contents)
    return Report(
        cache=str(root),
        level=level,
        identity=seal.identity if seal else None,
        shards=spec.num_shards,
        samples=sum(each.cached for each in next(iter(contents.values()))),
        bytes=sum(file.bytes for each in contents.values() for content in each for file in content.files),
        findings=tuple(findings),
    )


def read_seal_and_build(root: Path) -> tuple[Seal | None, list[Finding]]:
    """The seal, where it is sound, and what is wrong with the two records of the whole cache."""
    seal, findings = None, []
    try:
        seal = read_seal(root)
    except CacheError as error:
        findings.append(Finding(file=SEAL_FILE, problem=str(error)))
    try:
        read_build(root)
    except CacheError as error:
        findings.append(Finding(file=BUILD_FILE, problem=str(error)))
    return seal, findings


def metadata_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        path = root / name
        if not path.is_file():
            yield Finding(file=name, problem="is missing")
        elif path.read_bytes() != expected:
            yield Finding(file=name, problem="is not what the spec says it should be")


def stray_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    """Shard files, samples and records beyond the plan, and scratch files of a build that died."""
    shards = range(spec.num_shards)
    layout = shard_format(spec)
    known = {*layout.metadata(spec), *map(samples_file, shards)}
    for array in spec.arrays:
        known.update(commit_file(array, shard) for shard in shards)
        known.update(layout.shard_file(array, shard) for shard in shards)
    scratch = sorted(root.glob(f".*{SCRATCH_SUFFIX}"))
    folders = [sorted((root / folder).rglob("*")) for folder in sorted({name.split("/")[0] for name in known})]
    for paths in (scratch, *folders):
        for path in paths:
            name = path.relative_to(root).as_posix()
            if path.is_file() and name not in known:
                died = name.endswith(SCRATCH_SUFFIX)
                yield Finding(file=name, problem="left by a build that died" if died else "does not belong here")


def check_plan(root: Path, spec: Spec, seal: Seal | None, level: Level) -> tuple[PlanFile | None, list[Finding]]:
    """The plan, where it can be read, and what is wrong with it."""
    try:
        plan = PlanFile(root)
        if seal is not None and (finding := file_finding(root, seal.plan_file, level)):
            return plan, [finding]
        if level == "full" and plan_digest([read_plan(root)]) != spec.plan_digest:
            return plan, [Finding(file=PLAN_FILE, problem="is another plan than the spec's")]
    except CacheError as error:
        return None, [Finding(file=PLAN_FILE, problem=str(error))]
    return plan, []


def seal_findings(root: Path, spec: Spec, seal: Seal, contents: dict[str, list[CommitContent]]) -> Iterator[Finding]:
    """Whether the seal is the roll-up of the commit records and of the plan file."""
    expected = make_seal(root, spec, contents)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the roll-up of the commit records")


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
