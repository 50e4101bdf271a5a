"""Checking the seal against the commit records: which of them is at fault where they differ."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cache_store.cache.seal import cache_identity, make_seal
from cache_store.format.names import SEAL_FILE, commit_file
from cache_store.format.schema import CommitContent, Seal, Spec
from cache_store.verify.findings import Finding
from cache_store.verify.shard import CheckedShard

FLOAT_TOLERANCE = 1e-6


def seal_findings(spec: Spec, seal: Seal, checked: Sequence[CheckedShard], damaged: set[str]) -> Iterator[Finding]:
    """Whether the seal is the roll-up of the commit records; a record that it was not made from is named."""
    if seal.spec_digest != spec.digest:
        yield Finding(file=SEAL_FILE, problem="is the seal of another spec")
        return
    others = other_records(seal, checked)
    if len(others) == len(checked) > 1:
        yield Finding(file=SEAL_FILE, problem="is the seal of none of the commit records")
        return
    yield from (finding for finding in others if finding.file not in damaged)
    records = {commit_file(each.task.shard) for each in checked}
    if others or records & damaged:
        return  # what it should be cannot be told
    expected = make_seal(spec, contents_of(checked), seal.plan_file)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the roll-up of the commit records")


def contents_of(checked: Sequence[CheckedShard]) -> list[CommitContent]:
    """In order of shards; of shards without a record, nothing."""
    return [each.content for each in checked if each.content]


def other_records(seal: Seal, checked: Sequence[CheckedShard]) -> list[Finding]:
    """Readable records that are not those the cache was sealed with; none where the seal's own list is at fault."""
    findings = []
    for each in checked:
        shard = each.task.shard
        if each.content and not seal.holds(shard, each.content):
            problem = "is not the record that the cache was sealed with"
            findings.append(Finding(shard=shard, file=commit_file(shard), problem=problem))
    return [] if findings and cache_identity(contents_of(checked)) == seal.identity else findings


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
