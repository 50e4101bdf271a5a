"""Holding a repair to its word: shards that it built again are the ones that were sealed."""

from collections.abc import Sequence
from pathlib import Path

from cache_store.errors import CacheError
from cache_store.metadata import read_commit
from cache_store.publish import withdraw, write_file
from cache_store.record import canonical_json, record_digest
from cache_store.schema import SEAL_FILE, Seal, Spec, commit_file
from cache_store.seal import read_contents
from precompute.pipeline import ARRAY
from precompute.plan import some


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
        f"{root}: {len(others):,} of {len(rebuilt):,} shards built again did not come out as they were sealed, and are "
        f"missing now: {some(list(map(str, others)))}; their images have changed since, or another machine, library or "
        "batch size made them: restore that and run the same repair again, or take them as they come out now, as "
        "another cache for training, with `precompute build`"
    )


def other_shards(root: Path, spec: Spec, sealed: Seal | None, rebuilt: Sequence[int]) -> list[int]:
    """Rebuilt shards that are not as sealed; none where the seal is at fault itself, as one of no kept shard is."""
    if sealed is None or sealed.spec_digest != spec.digest or not rebuilt:
        return []
    digests = [record_digest(content) for content in read_contents(root, spec, ARRAY)]
    pairs = enumerate(zip(digests, sealed.commits.get(ARRAY, ()), strict=False))
    others = {shard for shard, (now, before) in pairs if now != before}
    kept = set(range(spec.num_shards)) - set(rebuilt)
    return [] if kept and kept <= others else sorted(others & set(rebuilt))


def delete_shard(root: Path, shard: int) -> None:
    """Record first: it vouches for the files."""
    record = read_commit(root, ARRAY, shard)
    withdraw(root / commit_file(ARRAY, shard))
    for file in record.content.files if record else ():
        withdraw(root / file.path)
