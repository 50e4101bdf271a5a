"""Saying exactly how a cache and what is asked of it now differ; nothing here touches the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.errors import StaleError
from cache_store.plan import read_plan
from cache_store.schema import Spec, samples_file
from precompute.images import content_sha256
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


def refuse_changed_images(root: Path, spec: Spec, source: Source, found: pa.Table, committed: list[int]) -> None:
    """StaleError naming committed samples whose image is no longer the one encoded.

    Only images whose fingerprint (a file's size and time, a zip member's crc) has changed are read again.
    """
    changed: list[str] = []
    for shard in committed:
        rows = spec.shard_rows(shard)
        now = found["fingerprint"].slice(rows.start, len(rows))
        if now.equals(read_plan(root, shard, ["fingerprint"])["fingerprint"]):
            continue
        changed.extend(changed_ids(root, shard, source, now))
    if changed:
        raise StaleError(f"{root}: {len(changed)} images are not the ones encoded: {some(changed)}\n  {KEEP_BOTH}")


def changed_ids(root: Path, shard: int, source: Source, now: pa.ChunkedArray) -> Iterator[str]:
    before = read_plan(root, shard, ["fingerprint"])["fingerprint"].to_pylist()
    samples = pq.read_table(root / samples_file(shard), columns=["id", "uri", "content_sha256"], partitioning=None)
    for was, is_now, sample in zip(before, now.to_pylist(), samples.to_pylist(), strict=True):
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
