"""What shards that are built again must come out as: damage is mended to the bytes that were, or not at all.

The seal says it, as long as any shard bears it out; where it is lost or at fault, a shard's own record.
"""

from cache_store.cache.seal import cache_identity
from cache_store.format.record import record_digest
from cache_store.format.schema import CommitContent, Seal, Spec
from precompute.resume.kept import FoundShard

Expected = dict[int, frozenset[str]]
"""By shard, digests of the contents that it may have; nothing of a shard of which nothing sound is left."""


def expected_shards(spec: Spec, seal: Seal | None, found: list[FoundShard]) -> Expected:
    """Of every shard: what the seal says, where that can be trusted; else what it or the shard's record says."""
    contents = {each.shard: each.record.content for each in found if each.record is not None}
    recorded = {shard: record_digest(content) for shard, content in contents.items()}
    sealed = sealed_digests(spec, seal, contents)
    if not recorded or any(recorded[shard] == sealed.get(shard) for shard in recorded):
        return {shard: frozenset([digest]) for shard, digest in (sealed or recorded).items()}
    return {shard: frozenset({digest, sealed.get(shard, digest)}) for shard, digest in recorded.items()}


def sealed_digests(spec: Spec, seal: Seal | None, contents: dict[int, CommitContent]) -> dict[int, str]:
    """Digests of every shard's content by the seal; its own list of them is checked by the identity where it can be."""
    if seal is None or seal.spec_digest != spec.digest:
        return {}
    if len(contents) == spec.num_shards and cache_identity(contents.values()) == seal.identity:
        return {shard: record_digest(content) for shard, content in contents.items()}
    return dict(enumerate(seal.commits)) if len(seal.commits) == spec.num_shards else {}
