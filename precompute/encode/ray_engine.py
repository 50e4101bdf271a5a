"""Workers on a Ray cluster: one actor per GPU, or per two CPU cores; each takes shards by number.

Ray places actors, starts nodes for waiting actors, and reports dead ones. A dead actor's shards go to the next worker
that asks; if Ray restarted the actor, it would keep its shards until it was placed again. A lost node may still be
writing, so files are only created where none exist, as ranks do.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.log import log_info
from cache_store.messages import printable
from cache_store.program.running import usable_cores
from cache_store.storage.daemon_threads import POLL_S
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.ray_cluster import (
    ClusterHead,
    RayCluster,
    connected,
    first_line,
    say_waiting,
    worker_resources,
)
from precompute.encode.ray_worker import RayWorker
from precompute.encode.worker import ENCODER_THREADS, GRACE_S, Event
from precompute.encoders.encoder import Encoder
from precompute.sources import Source

COUNT_INTERVAL_S = 1.0
"""Seconds between two counts of the cluster's resources."""

WAITING_REPORT_S = 30.0
"""Seconds between two messages that no worker has started yet."""

MAX_LOSSES = 3
"""Number of dead workers with the same shard, or without any, that stops the build; preempted nodes do not count."""

CONCURRENT_CALLS = 3
"""Calls that an actor serves at the same time: `work`, `give`, `drop`."""

PASSIVE = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Waiting OpenMP threads leave the cores to the decoders; `run_program` does the same for our other processes."""


def run_ray(
    job: EncodeJob, source: Source, encoder: Encoder, stop: threading.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Build the job's shards; raise Interrupted once `stop` is set."""
    wanted, num_shards = job.config.run.workers, len(job.shards)
    on_this_machine = max(1, usable_cores() // ENCODER_THREADS) if wanted == "auto" else wanted
    with connected(ENCODER_THREADS * min(on_this_machine, num_shards)) as cluster:
        resources = worker_resources(job.config.encoder.device, cluster)
        most = num_shards if wanted == "auto" else wanted
        RayPool(cluster, resources, job_of_actors(job, resources), most).run(stop, on_progress)


def job_of_actors(job: EncodeJob, resources: Mapping[str, int]) -> EncodeJob:
    """Return the job with absolute paths and the actors' device."""
    config, recorded = job.config, job.config.recorded()
    source = replace(config.source, **{name: recorded["source"][name] for name in ("path", "images")})
    device = "cuda" if resources["num_gpus"] else "cpu"
    encoder = replace(config.encoder, model=recorded["encoder"]["model"], device=device)
    config = replace(config, source=source, encoder=encoder)
    return replace(job, config=config, store=job.store.absolute())


@dataclass(eq=False)
class Worker:
    """A Ray actor, placed or waiting for a place."""

    actor: Any
    events: Any
    """Ray's stream of the actor's lists of events."""
    is_placed: bool = False
    shards: set[int] = field(default_factory=set)
    """Shards given to the actor and not finished."""
    unfinished: int = 0
    """Samples that the actor has reported for unfinished shards."""


class RayPool:
    """The workers, which may come and go, and the shards that no worker holds."""

    def __init__(self, cluster: RayCluster, resources: Mapping[str, int], job: EncodeJob, most: int) -> None:
        self._ray, self._cluster, self._resources, self._most = cluster.ray, cluster, resources, most
        self._slots, self._counted_at = 0, -math.inf
        """The cluster's room for workers, and when it was counted."""
        self._actor = self._ray.remote(RayWorker).options(
            max_concurrency=CONCURRENT_CALLS, runtime_env=PASSIVE, **resources
        )
        self._job = self._ray.put(replace(job, shards=()))
        self._shards = deque(job.shards)
        self._workers: list[Worker] = []
        self._lost = Counter[int | None]()
        """Number of workers that died, by shard held; None counts those that held none."""
        self._reported_at = time.monotonic()
        self._head = ClusterHead(str(self._ray.get_runtime_context().gcs_address))

    def run(self, stop: threading.Event, on_progress: Callable[[Progress], None]) -> None:
        errors, over = self._ray.exceptions, threading.Event()
        threading.Thread(target=self._head.watch, args=[over], daemon=True).start()
        try:
            while self._shards or any(worker.shards for worker in self._workers):
                if stop.is_set():
                    raise Interrupted("unfinished shards were dropped; run the same command again to go on")
                self._grow_or_shrink()
                self._handle_events(on_progress)
        except errors.RayTaskError:
            raise  # a bug of ours, with its traceback
        except errors.RayError as error:
            if stop.is_set():  # the signal also stopped the Ray that we started
                raise Interrupted("Ray stopped too; run the same command again to go on") from None
            raise EncodeOnceError(f"Ray: {first_line(error)}; run the same command again to go on") from None
        finally:
            over.set()
            with suppress(errors.RayError):
                self._end()

    def _grow_or_shrink(self) -> None:
        """Keep as many workers waiting as placed, so that the cluster can grow; keep none waiting if no shard is left.

        Placed workers end when they are told that no shard is left.
        """
        if not self._head.is_reachable:
            return
        if time.monotonic() - self._counted_at > COUNT_INTERVAL_S:
            self._slots, self._counted_at = self._cluster.slots(self._resources), time.monotonic()
        placed = sum(worker.is_placed for worker in self._workers)
        wanted = min(self._most, placed + len(self._shards), max(self._slots, 2 * placed))
        while len(self._workers) < wanted:
            actor = self._actor.remote()
            events = actor.work.options(num_returns="streaming").remote(self._job)
            self._workers.append(Worker(actor, events))
        waiting = [worker for worker in self._workers if not worker.is_placed]
        for worker in waiting[: len(self._workers) - max(wanted, placed)]:
            self._dismiss(worker)
        if not placed and time.monotonic() - self._reported_at > WAITING_REPORT_S:
            self._reported_at = time.monotonic()
            say_waiting(self._resources, self._cluster.totals())

    def _handle_events(self, on_progress: Callable[[Progress], None]) -> None:
        """Handle one list of events of each worker that sent one; raise a worker's failure."""
        streams = [worker.events for worker in self._workers]
        self._ray.wait(streams, timeout=POLL_S)
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
        for worker in [each for each in self._workers if each.events in ready]:
            for event in self._receive(worker, on_progress):
                if event is None:
                    self._give(worker)
                elif isinstance(event, EncodeOnceError | OSError):
                    raise event
                else:
                    self._record(worker, event)
                    on_progress(event)

    def _receive(self, worker: Worker, on_progress: Callable[[Progress], None]) -> list[Event]:
        """Return the worker's next events; dismiss it if it has ended or died."""
        try:
            events: list[Event] = self._ray.get(next(worker.events))
            worker.is_placed = True
            return events
        except StopIteration:
            self._dismiss(worker)
        except self._ray.exceptions.RayActorError as error:
            self._dismiss(worker)
            on_progress(Progress(samples=-worker.unfinished))  # another worker encodes them again
            self._refuse_repeated_losses(worker, error)
        return []

    def _give(self, worker: Worker) -> None:
        """Give the worker the next shard, or None if none is left; a shard lost later goes to another worker."""
        shard = self._shards.popleft() if self._shards else None
        worker.actor.give.remote(shard)
        if shard is not None:
            worker.shards.add(shard)

    def _record(self, worker: Worker, done: Progress) -> None:
        """Count the worker's samples, and remove a shard that it has finished."""
        worker.unfinished += done.samples
        if done.committed is not None:
            content = done.committed.content
            worker.shards.discard(content.shard)
            worker.unfinished -= content.cached + content.rejected
        if done.mismatched is not None:
            worker.shards.discard(done.mismatched.shard)
            worker.unfinished -= done.mismatched.samples.num_rows

    def _dismiss(self, worker: Worker) -> None:
        """Kill the worker, and put its shards back in the queue."""
        self._workers.remove(worker)
        self._shards.extendleft(sorted(worker.shards, reverse=True))
        self._ray.kill(worker.actor)

    def _refuse_repeated_losses(self, worker: Worker, error: Any) -> None:
        why = reason_of(error)
        if error.actor_init_failed:
            raise EncodeOnceError(f"Ray: a worker cannot start: {why}")
        held = describe_held(worker.shards)
        if not error.preempted:
            self._lost.update(worker.shards or [None])
        if self._lost and max(self._lost.values()) >= MAX_LOSSES:
            raise EncodeOnceError(
                f"{MAX_LOSSES} workers on Ray died, the last one {held}: {why}; committed shards are kept, run the "
                "same command again to go on"
            )
        log_info(printable(f"a worker on Ray was lost {held}, and another takes over: {why}"))

    def _end(self) -> None:
        """Let workers with a shard drop it and end; kill the others, and any that take longer than GRACE_S."""
        encoding = [worker for worker in self._workers if worker.shards]
        for worker in encoding:
            worker.actor.drop.remote()
        if encoding:
            self._ray.wait([each.events.completed() for each in encoding], num_returns=len(encoding), timeout=GRACE_S)
        for worker in self._workers:
            self._ray.kill(worker.actor)


def describe_held(shards: Collection[int]) -> str:
    """Describe the shards that a lost worker held: `with shard 4 in hand`."""
    numbers = ", ".join(map(str, sorted(shards)))
    return f"with shard{'s' * (len(shards) > 1)} {numbers} in hand" if shards else "before it began"


def reason_of(error: Any) -> str:
    """Extract the cause and the node's address from Ray's long message about a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    address = "".join(f" (node {line.removeprefix('ip: ')})" for line in lines if line.startswith("ip: "))
    return lines[-1].partition(". ")[0] + address
