"""Hands out a job's shards to workers, which a launcher starts.

Each shard has one writer, and its bytes do not depend on which worker that is.
"""

from collections import Counter, deque
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
        """Let workers drop their unfinished shards and end; kill those that outlast GRACE_S."""


def coordinate(job: EncodeJob, launcher: Launcher, report: Report) -> None:
    """Have the job's shards built; raise Interrupted once a stop is requested, or a worker's error.

    A worker first has one shard in hand and then two, so that it goes on while a shard is committed.
    """
    left, unfinished, in_hand = deque(job.shards), set[int | None](job.shards), Counter[Hashable]()
    try:
        while unfinished:
            if STOP_REQUEST.is_set():
                raise Interrupted("unfinished shards were dropped; run the same command again to go on")
            for worker, event in launcher.events(len(left), POLL_S):
                if event is not None:
                    report(event)
                    if event.ends_shard:
                        unfinished.remove(event.shard)
                        in_hand[worker] -= 1
                while left and in_hand[worker] < (1 if event is None else 2):
                    in_hand[worker] += 1
                    launcher.give(worker, left.popleft())
    finally:
        launcher.end()
