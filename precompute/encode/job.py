"""What an engine is given: shards to build, and all that a process on any machine has to know to build one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cache_store.format.schema import Spec
from cache_store.storage.store import Store
from precompute.config import BuildConfig


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
