"""What the shards that a repair builds again must come out as: a repair ends in the bytes that were, or in nothing.

The seal says it, as long as any shard bears it out; where it is lost or at fault, a shard's own record.
"""

import contextlib
from pathlib import Path

import pyarrow as pa

from cache_store.errors import CacheError
from cache_store.metadata import read_commit
from cache_store.record import record_digest
from cache_store.schema import LATENTS, CommitContent, Seal, Spec
from cache_store.seal import cache_identity
from cache_store.verify_record import content_findings
from precompute.kept import is_planned

Expected = dict[int, frozenset[str]]
"""By shard, digests of the contents that it may have; nothing of a shard of which nothing sound is left."""


def expected_shards(root: Path, spec: Spec, plan: pa.Table, seal: Seal | None) -> Expected:
    """Of every shard: what the seal says, where that can be trusted; else what it or the shard's record says."""
    contents = sound_contents(root, spec, plan)
    recorded = {shard: record_digest(content) for shard, content in contents.items()}
    sealed = sealed_digests(spec, seal, contents)
    if not recorded or any(recorded[shard] == sealed.get(shard) for shard in recorded):
        return {shard: frozenset([digest]) for shard, digest in (sealed or recorded).items()}
    return {shard: frozenset({digest, sealed.get(shard, digest)}) for shard, digest in recorded.items()}


def sound_contents(root: Path, spec: Spec, plan: pa.Table) -> dict[int, CommitContent]:
    """What records say that are whole and of the plan's samples, whatever became of their files."""
    contents = {}
    for shard in range(spec.num_shards):
        with contextlib.suppress(CacheError):
            record = read_commit(root, LATENTS, shard)
            if record is None or any(content_findings(spec, LATENTS, shard, record.content)):
                continue
            if is_planned(record.content, spec, plan):
                contents[shard] = record.content
    return contents


def sealed_digests(spec: Spec, seal: Seal | None, contents: dict[int, CommitContent]) -> dict[int, str]:
    """Digests of every shard's content by the seal; its own list of them is checked by the identity where it can be."""
    if seal is None or seal.spec_digest != spec.digest:
        return {}
    if len(contents) == spec.num_shards and cache_identity({LATENTS: list(contents.values())}) == seal.identity:
        return {shard: record_digest(content) for shard, content in contents.items()}
    digests = seal.commits.get(LATENTS, ())
    return dict(enumerate(digests)) if len(digests) == spec.num_shards else {}
