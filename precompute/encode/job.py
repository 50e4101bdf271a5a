"""What an engine is given, what it reports, and how busy each part of a build was."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from cache_store.format.schema import CommitRecord, Spec
from cache_store.storage.store import Store
from precompute.config import BuildConfig

Part = Literal["source", "decoding", "encoding", "writing"]

REMEDIES: dict[Part, str] = {
    "source": "faster storage helps, or more threads that wait for it (run.decode_threads)",
    "decoding": "more cores help, or image.decode: reduced where photographs are large",
    "encoding": "more or faster GPUs help",
    "writing": "more workers help (run.workers), or a faster disk",
}
"""Advice for the part that is the slowest."""

IN_FLOAT32 = ", or a cache of encoder.compute_dtype: bfloat16"
"""Added to the advice for encoding in float32."""


class BusyTimes:
    """Seconds by part, added up by several threads; of parts that several threads share, as if they were one."""

    def __init__(self, decode_threads: int) -> None:
        self._threads: dict[Part, int] = {"source": decode_threads, "decoding": decode_threads}
        self._seconds, self._lock = defaultdict[Part, float](float), threading.Lock()

    def add(self, part: Part, seconds: float) -> None:
        with self._lock:
            self._seconds[part] += seconds / self._threads.get(part, 1)

    @contextmanager
    def measured(self, part: Part) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(part, time.monotonic() - started)

    def take(self) -> dict[Part, float]:
        """Return the times added since the last call."""
        with self._lock:
            taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


def slowest(seconds: Mapping[Part, float]) -> Part | None:
    """The part that was busy most of the time, if any was."""
    return max(seconds, key=lambda part: seconds[part], default=None)


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
