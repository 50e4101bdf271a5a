"""Saying exactly how a cache and what is asked of it now differ; nothing here touches the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from cache_store.errors import CacheError, StaleError
from cache_store.plan import PlanFile
from cache_store.schema import Spec, commit_file, samples_file
from cache_store.tables import read_table
from precompute.images import content_sha256
from precompute.pipeline import ARRAY
from precompute.plan import compare_plans, some
from precompute.rejects import Rejected
from precompute.sources import Source
from precompute.sources.image_store import MISSING

KEEP_BOTH = "build into another folder (--cache NEW) or restore the earlier inputs; this cache is untouched"


def refuse_other_spec(root: Path, cached: Spec, asked: Spec) -> None:
    """StaleError with a table of the fields that differ; the plan is compared by `refuse_other_plan`."""
    before, now = flatten(msgspec.to_builtins(cached)), flatten(msgspec.to_builtins(asked))
    rows = [
        (name, str(before.get(name, "absent")), str(now.get(name, "absent")))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if rows:
        table = lay_out([("field", "in the cache", "now"), *rows])
        raise StaleError(f"{root} was made from other inputs:\n{table}\n  {KEEP_BOTH}")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flatten(child, f"{prefix}.{name}" if prefix else name) for name, child in value.items()]
    return {name: child for part in parts for name, child in part.items()}


def lay_out(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join("  " + line.rstrip() for line in lines)


def refuse_other_plan(root: Path, planned: pa.Table, found: pa.Table) -> None:
    """StaleError naming samples that are new, gone or changed in the source's list."""
    if difference := compare_plans(planned, found):
        raise StaleError(f"{root} was planned from another sample list: {difference}\n  {KEEP_BOTH}")


def refuse_changed_images(root: Path, spec: Spec, source: Source, found: pa.Table, plan: PlanFile | None) -> int:
    """StaleError naming samples, of shards ever committed, whose image is no longer the one encoded.

    Only images whose fingerprint (a file's size and time, a zip member's crc) is not the plan's are read again; all
    of them where the plan is lost. Returns how many images were missing when they were planned and are there now.
    """
    changed: list[str] = []
    found_again = 0
    for shard in range(spec.num_shards):
        if (root / commit_file(ARRAY, shard)).exists():
            rows = spec.shard_rows(shard)
            now = found["fingerprint"].slice(rows.start, len(rows)).to_pylist()
            before = plan.shard(shard, ["fingerprint"])["fingerprint"].to_pylist() if plan else [None] * len(now)
            if now != before:
                changed.extend(changed_ids(root, shard, source, before, now))
                found_again += sum(was == MISSING != is_now for was, is_now in zip(before, now, strict=True))
    if changed:
        raise StaleError(f"{root}: {len(changed)} images are not the ones encoded: {some(changed)}\n  {KEEP_BOTH}")
    return found_again


def changed_ids(root: Path, shard: int, source: Source, before: list[str | None], now: list[str]) -> Iterator[str]:
    """Ids of changed images; none where the shard's samples are lost, since then nothing says what they were."""
    try:
        samples = read_table(root / samples_file(shard), ["id", "uri", "content_sha256"]).to_pylist()
    except CacheError:
        return
    for was, is_now, sample in zip(before, now, samples, strict=True):
        if was != is_now and content_changed(source, sample, is_now):
            yield sample["id"]


def content_changed(source: Source, sample: dict[str, Any], fingerprint: str) -> bool:
    if sample["content_sha256"] is None:
        return False  # rejected unread, and stays so: no latent depends on it
    if fingerprint == MISSING:
        return True
    try:
        return bool(content_sha256(source.read(sample["uri"])) != sample["content_sha256"])
    except Rejected:
        return True
