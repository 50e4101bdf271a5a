"""Hands out a job's shards to workers, which a launcher starts.

Each shard has one writer, and its bytes do not depend on which worker that is.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from cache_store.errors import Interrupted
from cache_store.storage.daemon_threads import POLL_S, STOP_REQUEST
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.worker import Report

GRACE_S = 10.0
"""Seconds for workers to stop: each first finishes a batch."""

Event = Progress | None
"""A worker's message; None, its first one: it is ready for a shard."""


class Launcher(Protocol):
    """Starts workers, and carries shards to them and their messages back."""

    def events(self, shards_left: int, timeout_s: float) -> Iterable[tuple[Any, Event]]:
        """Yield the next messages, each with its worker, or raise a worker's error; `shards_left` are not given yet."""

    def give(self, worker: Any, shard: int) -> None: ...

    def end(self) -> None:
        """Let workers drop their unfinished shards and end; kill those that are not ready, or outlast GRACE_S."""


def coordinate(job: EncodeJob, launcher: Launcher, report: Report) -> None:
    """Have the job's shards built; raise Interrupted once a stop is requested, or a worker's error.

    A worker gets another shard as soon as it has begun the last one: it goes on while a shard is committed.
    """
    left, unfinished, not_begun = deque(job.shards), set[int | None](job.shards), dict[Hashable, int | None]()
    try:
        while unfinished:
            if STOP_REQUEST.is_set():
                raise Interrupted("unfinished shards were dropped; run the same command again to go on")
            for worker, event in launcher.events(len(left), POLL_S):
                if event is not None:
                    report(event)
                    if event.ends_shard:
                        unfinished.remove(event.shard)
                if event is None or event.shard == not_begun[worker]:
                    not_begun[worker] = left.popleft() if left else None
                    if (shard := not_begun[worker]) is not None:
                        launcher.give(worker, shard)
    finally:
        launcher.end()
