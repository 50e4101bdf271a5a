"""The job that workers are given, the progress that they report, and the busy time of each part of a build."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from cache_store.format.schema import CommitRecord, Spec
from cache_store.storage.store import Store
from precompute.config import BuildConfig
from precompute.inputs.busy import Part

REMEDIES: dict[Part, str] = {
    "source": "faster storage helps, or more threads that wait for it (run.decode_threads)",
    "decoding": "more cores help, or image.decode: reduced where photographs are large",
    "encoding": "more or faster GPUs help",
    "writing": "more workers help (run.workers), or a faster disk",
}
"""Advice by slowest part; the check of a device is made once, so that it holds no long build back."""


def slowest(seconds: Mapping[Part, float]) -> Part | None:
    """Return the part that was busy for the longest time, except checking; None if no part was."""
    return max((part for part in REMEDIES if part in seconds), key=lambda part: seconds[part], default=None)


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Shards of a cache whose plan and spec are on disk."""

    config: BuildConfig
    """The build's config: source, encoder, number of workers and threads."""
    store: Store
    spec: Spec
    shards: Sequence[int] = ()
    digests: Mapping[int, str] = field(default_factory=dict)
    """Content digests that shards must have; one without an entry may have any content."""
    shared: bool = False
    """Whether other programs build this cache too, perhaps the same shards."""
    never_replace: Collection[int] = frozenset()
    """Shards whose files must not replace others: another program or a lost node may be writing them too."""


@dataclass(frozen=True, kw_only=True)
class MismatchedShard:
    """A rebuilt shard with another digest than it must have; the old shard stays."""

    shard: int
    digest: str
    """Digest of the rebuilt content."""
    samples: pa.Table
    """Samples of the rebuilt shard: id, content_sha256, status, reason."""


@dataclass(frozen=True)
class Progress:
    """The result of one pipeline step."""

    shard: int | None = None
    """The step's shard; None if a step only waited for the last commit."""
    samples: int = 0
    """Samples encoded."""
    elapsed_s: float = 0.0
    """Seconds of one worker."""
    busy_s: Mapping[Part, float] = field(default_factory=dict)
    """Seconds of these that each part was busy."""
    gpu_use: Sequence[float] = ()
    """Readings of the share of time in which the worker's GPU was busy, one a second."""
    committed: CommitRecord | None = None
    is_others: bool = False
    """Whether another program had committed the shard meanwhile."""
    mismatched: MismatchedShard | None = None

    @property
    def ends_shard(self) -> bool:
        return self.committed is not None or self.mismatched is not None
