"""Check the files of the whole cache (spec, plan, seal) and decide which is at fault if they differ."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cache_store.cache.commit import cache_identity, make_seal
from cache_store.cache.metadata import metadata_of, open_plan
from cache_store.cache.survey import Survey, held_recipe
from cache_store.errors import DAMAGE, CacheError, StaleError
from cache_store.format.layout import BUILD_FILE, PLAN_FILE, REJECTED_FILE, SEAL_FILE, commit_file, samples_file
from cache_store.format.plan import plan_digest
from cache_store.format.schema import CommitContent, Seal, Spec
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding, damage_finding
from cache_store.verify.record import file_finding
from cache_store.verify.shard import CheckedShard, ShardTask

FLOAT_TOLERANCE = 1e-6


def is_contradicted(survey: Survey, spec: Spec) -> bool:
    """Return whether the spec is at fault: records have another recipe, or both seal and plan have another spec."""
    try:
        if held_recipe(survey) != spec.recipe:
            return True
    except StaleError:
        return False  # records differ from each other; each is reported by itself
    seal = survey.seal.value
    return seal is not None and seal.spec != spec and not is_planned(survey.store, spec)


def is_planned(store: Store, spec: Spec) -> bool:
    """Return whether the plan is the spec's; True also if it cannot be read."""
    try:
        plan = open_plan(store)
        return plan.is_cut_as(spec) and plan.digests().whole == spec.plan_digest
    except CacheError:
        return True


def metadata_findings(survey: Survey, spec: Spec) -> Iterator[Finding]:
    """Check the files that the spec determines, the seal and the build record."""
    for name, expected in metadata_of(spec):
        try:
            if survey.store.read(name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except DAMAGE as error:
            yield damage_finding(error, survey.store, name)
    for name, reading in ((SEAL_FILE, survey.seal), (BUILD_FILE, survey.build)):
        if reading.problem or (name == BUILD_FILE and reading.is_absent):
            yield damage_finding(reading.problem or FileNotFoundError(), survey.store, name)
        elif reading.is_absent:
            is_stopped = survey.build.value is not None and survey.build.value.withdrawing
            why = "a withdrawal has not finished" if is_stopped else "the cache is not sealed"
            yield Finding(file=name, problem=f"is missing: {why}", kind="unsealed")
    build, seal = survey.build.value, survey.seal.value
    if build and seal and not build.withdrawing and build.spec_digest not in ("", seal.spec.digest):
        yield Finding(file=BUILD_FILE, problem="is another cache's: it has the digest of another spec")


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """The result of checking the plan."""

    findings: tuple[Finding, ...] = ()
    digests: dict[int, str] = field(default_factory=dict)
    """Plan digest of each shard whose rows were read; empty if the plan is damaged."""

    def compare(self, checked: Iterable[CheckedShard]) -> Iterator[Finding]:
        """Yield a finding for each commit record that was made for other rows than the plan's."""
        for each in checked:
            shard = each.task.shard
            if each.content and self.digests.get(shard, each.content.plan_digest) != each.content.plan_digest:
                problem = "was made for other samples than the plan's"
                yield Finding(shard=shard, file=commit_file(shard), problem=problem)


def check_plan(store: Store, spec: Spec, seal: Seal | None, tasks: Sequence[ShardTask]) -> CheckedPlan:
    """Check the plan; its hash is compared at every level, since it is one file.

    Rows are read at level deep, and at level full without a seal: those of the shards that are read. If all shards are,
    the plan's digest must also be the spec's.
    """
    levels = ("deep",) if seal else ("full", "deep")
    shards = [task.shard for task in tasks if task.level in levels]
    try:
        plan = open_plan(store)
        if seal is not None and (
            finding := file_finding(store, msgspec.structs.replace(seal.plan_file, path=PLAN_FILE))
        ):
            return CheckedPlan(findings=(finding,))
        if len(shards) < len(tasks):
            return CheckedPlan(digests={shard: plan_digest(plan.shard(shard, plan.digested)) for shard in shards})
        digests = plan.digests()
    except DAMAGE as error:
        return CheckedPlan(findings=(damage_finding(error, store, PLAN_FILE),))
    if plan.is_cut_as(spec) and digests.whole == spec.plan_digest:
        return CheckedPlan(digests=dict(enumerate(digests.shards)))
    return CheckedPlan(findings=(Finding(file=PLAN_FILE, problem="is another plan than the spec's"),))


def seal_findings(spec: Spec, seal: Seal, checked: Sequence[CheckedShard], damaged: set[str]) -> Iterator[Finding]:
    """Check that the seal summarises the commit records, and name each record that was not sealed.

    The statistics need every samples table's footer, so they are not checked if a shard is checked at level quick.
    """
    if seal.spec != spec:
        yield Finding(file=SEAL_FILE, problem="is the seal of another spec")
        return
    others = unsealed_records(seal, checked)
    if len(others) == len(checked) > 1:
        yield Finding(file=SEAL_FILE, problem="matches none of the commit records")
        return
    yield from (finding for finding in others if finding.file not in damaged)
    records = {commit_file(each.task.shard) for each in checked}
    if others or records & damaged:
        return  # the expected seal cannot be computed
    contents, has_quick = contents_of(checked), any(each.task.level == "quick" for each in checked)
    if {samples_file(each.task.shard) for each in checked} & damaged:
        return
    plan_file = msgspec.structs.replace(seal.plan_file, path=PLAN_FILE)
    rejected_file = msgspec.structs.replace(seal.rejected_file, path=REJECTED_FILE)
    stated = msgspec.structs.replace(seal.array, bytes=sum(each.files[0].bytes for each in contents))
    sums = [each.sums for each in checked]
    expected = make_seal(spec, contents, sums, (plan_file, rejected_file), stated if has_quick else None)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the summary of the commit records")


def contents_of(checked: Sequence[CheckedShard]) -> list[CommitContent]:
    """List the contents of the readable records, in shard order."""
    return [each.content for each in checked if each.content]


def unsealed_records(seal: Seal, checked: Sequence[CheckedShard]) -> list[Finding]:
    """List readable records that were not sealed; empty if the seal's own list is at fault."""
    findings = []
    for each in checked:
        shard = each.task.shard
        if each.content and not seal.holds(shard, each.content):
            problem = "is not the record that the cache was sealed with"
            findings.append(Finding(shard=shard, file=commit_file(shard), problem=problem))
    return [] if findings and cache_identity(contents_of(checked)) == seal.identity else findings


def nearly_equal(expected: Any, found: Any) -> bool:
    """Compare two values, floats up to rounding: another machine may differ in the last bits of the preview map.

    The seal's own sha256 has been checked when it was read.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(nearly_equal(expected[name], found[name]) for name in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(nearly_equal, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return bool(expected == found)
