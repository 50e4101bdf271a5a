"""Holding a repair to its word where nothing but the seal says what a shard was.

The images of a shard that is built again are compared with what its samples table remembers. Where that table is lost,
an image that changed shows only in the result: the shard is not the one that was sealed.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from cache_store.errors import CacheError
from cache_store.metadata import read_commit
from cache_store.publish import withdraw, write_file
from cache_store.record import canonical_json, record_digest
from cache_store.schema import LATENTS, SEAL_FILE, CommitRecord, Seal, Spec, commit_file
from cache_store.seal import read_contents
from precompute.image_changes import remembered_samples
from precompute.plan import some


def unremembered_shards(root: Path, spec: Spec, plan: pa.Table, kept: Sequence[CommitRecord]) -> list[int]:
    """Shards that are not kept and whose samples tables remember no images."""
    missing = set(range(spec.num_shards)) - {record.content.shard for record in kept}
    rows = {shard: spec.shard_rows(shard) for shard in sorted(missing)}
    planned = {shard: plan.slice(each.start, len(each)) for shard, each in rows.items()}
    return [shard for shard, table in planned.items() if not remembered_samples(root, shard, table)]


def refuse_other_shards(root: Path, spec: Spec, sealed: Seal | None, rebuilt: Sequence[int]) -> None:
    """CacheError naming rebuilt shards that are not those of the seal that the cache had.

    They are deleted, and the seal is put back: the cache stays the one it was, with these shards missing.
    """
    others = other_shards(root, spec, sealed, rebuilt)
    if sealed is None or not others:
        return
    for shard in others:
        delete_shard(root, shard)
    write_file(root / SEAL_FILE, canonical_json(sealed))
    raise CacheError(
        f"{root}: {len(others):,} shards built again did not come out as they were sealed, and are missing now: "
        f"{some(list(map(str, others)))}; their samples tables were lost, so an image may have changed unseen, or "
        "another machine or library made them: restore that and run the same repair again, or take them as they come "
        "out now, as another cache for training, with `precompute build`"
    )


def other_shards(root: Path, spec: Spec, sealed: Seal | None, rebuilt: Sequence[int]) -> list[int]:
    """Rebuilt shards that are not as sealed; none where the seal is at fault itself, as one of no kept shard is."""
    if sealed is None or sealed.spec_digest != spec.digest or not rebuilt:
        return []
    digests = [record_digest(content) for content in read_contents(root, spec, LATENTS)]
    pairs = enumerate(zip(digests, sealed.commits.get(LATENTS, ()), strict=False))
    others = {shard for shard, (now, before) in pairs if now != before}
    kept = set(range(spec.num_shards)) - set(rebuilt)
    return [] if kept and kept <= others else sorted(others & set(rebuilt))


def delete_shard(root: Path, shard: int) -> None:
    """Record first: it vouches for the files."""
    record = read_commit(root, LATENTS, shard)
    withdraw(root / commit_file(LATENTS, shard))
    for file in record.content.files if record else ():
        withdraw(root / file.path)
