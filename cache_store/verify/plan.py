"""Checking the plan: whether it is the file that the seal names and has the rows that spec and shards were made for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cache_store.cache.files import open_plan, stored_sha256
from cache_store.errors import CacheError
from cache_store.format.names import PLAN_FILE, SEAL_FILE, commit_file
from cache_store.format.plan import PlanFile
from cache_store.format.schema import Seal, Spec
from cache_store.storage.store import Store
from cache_store.verify.file import file_finding, unreadable
from cache_store.verify.findings import Finding
from cache_store.verify.shard import CheckedShard, ShardTask


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
            shard = each.task.shard
            if each.content and self.digests.get(shard, each.content.plan_digest) != each.content.plan_digest:
                problem = "was made for other samples than the plan's"
                yield Finding(shard=shard, file=commit_file(shard), problem=problem)


def plan_task(tasks: Sequence[ShardTask], seal: Seal | None) -> PlanTask:
    """Rows are looked at where no seal vouches for the file, and at level deep whatever it says."""
    levels = ("deep",) if seal else ("full", "deep")
    shards = [task.shard for task in tasks if task.level in levels]
    return PlanTask(shards=frozenset(shards), whole=len(shards) == len(tasks))


def check_plan(store: Store, spec: Spec, seal: Seal | None, task: PlanTask) -> CheckedPlan:
    """Its hash at every level, since it is one file; and the rows that the task names."""
    try:
        plan = open_plan(store)
        if seal is not None and (finding := file_finding(store, seal.plan_file, "full")):
            return CheckedPlan(findings=tuple(plan_or_seal(store, plan, spec, finding)))
        if not task.whole:
            return CheckedPlan(digests={shard: plan.shard_digest(shard) for shard in sorted(task.shards)})
        digest, digests = plan.digests()
    except (CacheError, OSError) as error:
        return CheckedPlan(findings=(unreadable(error, store, PLAN_FILE),))
    if (plan.num_shards, digest) == (spec.num_shards, spec.plan_digest):
        return CheckedPlan(digests=digests)
    return CheckedPlan(findings=(Finding(file=PLAN_FILE, problem="is another plan than the spec's"),))


def plan_or_seal(store: Store, plan: PlanFile, spec: Spec, finding: Finding) -> Iterator[Finding]:
    """The plan is not the file that the seal names; the seal may be wrong where the plan contradicts itself nowhere.

    That is, where it has the spec's rows and is, to the bit, what is written for them.
    """
    if finding.file != PLAN_FILE:
        yield Finding(file=SEAL_FILE, problem=f"names {finding.file} as the plan")
        return
    yield finding
    if plan.digests()[0] == spec.plan_digest and plan.sha256_as_written() == stored_sha256(store, PLAN_FILE):
        yield Finding(file=SEAL_FILE, problem="or the seal is wrong about the plan, which is as it is written")
