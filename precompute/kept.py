"""What a build keeps of an existing cache: shards whose records and files fit, and metadata, mended where lost."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cache_store.errors import CacheError
from cache_store.findings import Finding
from cache_store.formats import shard_format
from cache_store.metadata import read_build, read_seal, write_build
from cache_store.plan import plan_digest, write_plan
from cache_store.publish import withdraw, write_file
from cache_store.record import record_digest
from cache_store.schema import (
    LATENTS,
    PLAN_FILE,
    SEAL_FILE,
    CommitContent,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
)
from cache_store.verify_record import kept_record
from cache_store.verify_spec import metadata_findings
from precompute.config import BuildConfig
from precompute.progress import say


@dataclass(frozen=True)
class KeptShards:
    """Records of the shards that need no work, and why others that were committed once do."""

    records: list[CommitRecord]
    damaged: dict[int, str]


def find_kept(
    root: Path, spec: Spec, plan: pa.Table, without: Container[int | None], expected: Mapping[int, Container[str]]
) -> KeptShards:
    """Sort the committed shards, those of `without` aside, into what can be kept and what cannot.

    `expected` are the digests of the contents that a shard may have, where anything says it.
    """
    kept = KeptShards([], {})
    for shard in range(spec.num_shards):
        if shard not in without:
            record, problem = usable_record(root, spec, shard, plan)
            if record is not None and problem is None and shard in expected:
                problem = None if record_digest(record.content) in expected[shard] else str(other_record(shard))
            if record is not None and problem is None:
                kept.records.append(record)
            elif problem is not None:
                kept.damaged[shard] = problem
    return kept


def usable_record(root: Path, spec: Spec, shard: int, plan: pa.Table) -> tuple[CommitRecord | None, str | None]:
    """A shard's record, and why the shard cannot be kept: its samples must be the plan's, too."""
    record, problem = kept_record(root, spec, LATENTS, shard)
    if record is not None and problem is None and not is_planned(record.content, spec, plan):
        problem = str(Finding(shard=shard, file=commit_file(LATENTS, shard), problem="was made for other samples"))
    return record, problem


def is_planned(content: CommitContent, spec: Spec, plan: pa.Table) -> bool:
    """Whether a shard was made for the samples that the plan has in its rows."""
    rows = spec.shard_rows(content.shard)
    return content.plan_digest == plan_digest([plan.slice(rows.start, len(rows))])


def other_record(shard: int) -> Finding:
    problem = "is not the record that the cache was sealed with"
    return Finding(shard=shard, file=commit_file(LATENTS, shard), problem=problem)


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
