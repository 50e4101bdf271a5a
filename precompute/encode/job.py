"""What an engine is given, shards to build and all that a process on any machine needs for one, and what it reports."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from cache_store.format.schema import CommitRecord, Spec
from cache_store.storage.store import Store
from precompute.config import BuildConfig
from precompute.encode.busy import Part


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Shards of a cache whose plan and spec are on disk."""

    config: BuildConfig
    """Where source and encoder are, how many workers and threads there are to be."""
    store: Store
    spec: Spec
    shards: Sequence[int] = ()
    allowed_digests: Mapping[int, Collection[str]] = field(default_factory=dict)
    """By shard, digests of the contents that it may have; any where there are none."""
    shared: bool = False
    """Whether other programs build this cache too, and perhaps the same shards."""
    new: Collection[int] = frozenset()
    """Shards that were never there, in a store that keeps no other program out: their files replace none."""


@dataclass(frozen=True, kw_only=True)
class MismatchedShard:
    """A shard that did not come out as it was, so that the one that was there stays."""

    shard: int
    digest: str
    """Of the content that it would have had."""
    samples: pa.Table
    """Its samples, as it would have had them: id, content_sha256, status, reason."""


@dataclass(frozen=True)
class Progress:
    """What one step of the pipeline did."""

    samples: int = 0
    """Encoded; negative where the shard of so many was lost before it was committed."""
    elapsed_s: float = 0.0
    """Of one worker's time."""
    busy_s: Mapping[Part, float] = field(default_factory=dict)
    """Of that time, what each part was busy."""
    committed: CommitRecord | None = None
    mismatched: MismatchedShard | None = None
