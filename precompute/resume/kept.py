"""What a build keeps of an existing cache: shards whose records and files fit, and metadata, mended where lost."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cache_store.cache.metadata import read_build, read_seal, write_build
from cache_store.errors import CacheError
from cache_store.format.formats import shard_format
from cache_store.format.plan import plan_digest, write_plan
from cache_store.format.record import record_digest
from cache_store.format.schema import (
    PLAN_FILE,
    SEAL_FILE,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
)
from cache_store.storage.publish import withdraw, write_file
from cache_store.verify.findings import Finding
from cache_store.verify.record import kept_record
from cache_store.verify.spec import metadata_findings
from precompute.config import BuildConfig
from precompute.encode.progress import say


@dataclass(frozen=True)
class FoundShard:
    """What lies in the place of one shard."""

    shard: int
    record: CommitRecord | None
    """Where it is whole, of the spec and of the plan's samples, whatever became of the shard's files."""
    problem: str | None
    """Why the shard, which was committed once, cannot be kept."""


def find_shards(root: Path, spec: Spec, plan: pa.Table, without: int | None) -> list[FoundShard]:
    """Every shard that a cache can have, but for the one `without`."""
    return [find_shard(root, spec, shard, plan) for shard in range(spec.num_shards) if shard != without]


def find_shard(root: Path, spec: Spec, shard: int, plan: pa.Table) -> FoundShard:
    record, problem = kept_record(root, spec, shard)
    if record is None:
        return FoundShard(shard, None, problem)
    rows = spec.shard_rows(shard)
    if record.content.plan_digest != plan_digest([plan.slice(rows.start, len(rows))]):
        return FoundShard(shard, None, problem or record_problem(shard, "was made for other samples"))
    return FoundShard(shard, record, problem)


@dataclass(frozen=True)
class KeptShards:
    """Records of the shards that need no work, and why others that were committed once do."""

    records: list[CommitRecord]
    damaged: dict[int, str]


def sort_shards(found: list[FoundShard], expected: Mapping[int, Container[str]]) -> KeptShards:
    """What can be kept and what cannot; `expected` are the digests of the contents that a shard may have, if any."""
    problems = {each.shard: each.problem or other_than_expected(each, expected) for each in found}
    records = [each.record for each in found if each.record is not None and problems[each.shard] is None]
    return KeptShards(records, {shard: problem for shard, problem in problems.items() if problem is not None})


def other_than_expected(found: FoundShard, expected: Mapping[int, Container[str]]) -> str | None:
    if found.record is None or found.shard not in expected:
        return None
    if record_digest(found.record.content) in expected[found.shard]:
        return None
    return record_problem(found.shard, "is not the record that the cache was sealed with")


def record_problem(shard: int, problem: str) -> str:
    return str(Finding(shard=shard, file=commit_file(shard), problem=problem))


def sound_seal(root: Path) -> Seal | None:
    """The seal of a cache that is sealed."""
    try:
        return read_seal(root)
    except CacheError:
        return None


def unseal(root: Path) -> None:
    """Before anything that the seal vouches for is changed."""
    withdraw(root / SEAL_FILE)


def restore_metadata(root: Path, config: BuildConfig, spec: Spec) -> None:
    """Write again what spec and config determine and the folder lacks; remember the inputs that were found to fit."""
    for finding in metadata_findings(root, spec):
        say(f"damage found and mended: {finding}")
        write_file(root / finding.file, shard_format(spec).metadata(spec)[finding.file])
    try:
        remembered = read_build(root).config
    except CacheError as error:
        say(f"damage found and mended: {error}")
        remembered = {}
    if remembered != config.recorded():
        write_build(root, config.recorded())


def write_plan_of(root: Path, spec: Spec, plan: pa.Table) -> None:
    shards = map(spec.shard_rows, range(spec.num_shards))
    write_plan(root / PLAN_FILE, (plan.slice(rows.start, len(rows)) for rows in shards))
