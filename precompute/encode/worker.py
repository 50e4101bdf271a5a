"""A worker builds the shards that it is given and reports every step, in whatever process a launcher started it.

`coordinate` hands a job's shards out. Each shard has one writer, and its bytes do not depend on which worker that is.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec
import torch

from cache_store.errors import Interrupted
from cache_store.format.schema import Spec
from cache_store.log import set_up_log
from cache_store.messages import differences_between, refuse
from cache_store.storage.threads import POLL_S, STOP_REQUEST
from precompute.encode.canary import Canary
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.sources.images import Source
from precompute.sources.opening import open_source

ENCODER_THREADS = 2
"""Threads of each worker's encoder on a CPU; a larger machine has more workers. oneDNN orders some convolutions by the
number of threads (torch 2.13: images of 32 x 40 pixels differ between 1, 2 and 4 threads, of 64 x 128 between 4 and 8),
and bytes must not depend on how many workers share how many cores.
"""

Report = Callable[[Progress], None]
"""Takes a step's progress; called from several threads."""


def run_worker(
    job: EncodeJob,
    source: Source,
    encoder: Encoder,
    runs: Iterable[Iterable[int]],
    decode_threads: int,
    report: Report,
) -> None:
    torch.set_num_threads(ENCODER_THREADS)
    with Canary(job.config.encoder, job.spec.array.image) as canary:
        encode_shards(job, source, encoder, runs, decode_threads=decode_threads, on_progress=report, canary=canary)


class Inbox:
    """The shards that a worker of another process was given."""

    def __init__(self) -> None:
        self._shards = SimpleQueue[int | None]()
        self.put = self._shards.put

    def drop(self) -> None:
        STOP_REQUEST.set()
        self._shards.put(None)

    def runs(self) -> Iterator[Iterator[int]]:
        """Wait for shards again and again; a run ends when no other shard has come, so that it waits for none."""
        while not STOP_REQUEST.is_set() and (shard := self._shards.get()) is not None:
            yield chain([shard], self._here())

    def _here(self) -> Iterator[int]:
        while not self._shards.empty() and (shard := self._shards.get()) is not None:
            yield shard


def start_worker(
    job: EncodeJob, decode_threads: int, inbox: Inbox, report: Report, ready: Callable[[], object]
) -> None:
    """Open the source, load the encoder, call `ready`, and build the shards in the inbox."""
    set_up_log("precompute")
    torch.set_num_threads(ENCODER_THREADS)
    silence_decoders()
    encoder = load_encoder(job.config.encoder, job.spec.array.image)
    refuse_mismatched_encoder(encoder, job.spec)
    source = open_source(job.config.source, job.config.media)
    ready()
    run_worker(job, source, encoder, inbox.runs(), decode_threads, report)


def refuse_mismatched_encoder(encoder: Encoder, spec: Spec) -> None:
    if encoder.identity != spec.array.encoder:
        planned, loaded = (msgspec.to_builtins(each) for each in (spec.array.encoder, encoder.identity))
        summary = "encoder.model changed while the build was starting"
        refuse(summary, differences_between(planned, loaded), ["run the same command again"], held="when planned")


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
    """Have the job's shards built; a worker first has one in hand, then two, so that it goes on during a commit."""
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
