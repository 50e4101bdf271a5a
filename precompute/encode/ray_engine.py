"""Workers all over a Ray cluster: one actor for each GPU, or for every two cores, that takes shards by number.

Ray finds places for actors, has nodes started for those that wait, and says which have died. What a dead one had in
hand is given to the next that asks: restarted by Ray, it would keep its shards until it had a place again. A lost node
may still be at work, so that files are made where there are none, as ranks make theirs.
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
from cache_store.program.running import usable_cores
from cache_store.refusal import printable
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.ray_cluster import (
    ClusterHead,
    RayCluster,
    connected,
    first_line,
    place_of_worker,
    say_waiting,
)
from precompute.encode.ray_worker import RayWorker
from precompute.encode.worker import ENCODER_THREADS, GRACE_S, POLL_S, Event
from precompute.encoders.encoder import Encoder
from precompute.sources import Source

COUNTED_S = 1.0
"""Between two looks at what the cluster has."""

WAITING_SAID_S = 30.0
"""Between two words about waiting for a place."""

LOSSES = 3
"""Of workers with the same shard, or of workers that had none: then it is no accident. Preempted nodes do not count."""

CALLS = 3
"""That an actor answers at the same time: `work`, `give`, `drop`."""

PASSIVE = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""As `run_program` has it for our other processes: threads that wait leave the cores to those that decode."""


def run_ray(
    job: EncodeJob, source: Source, encoder: Encoder, stop: threading.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Build the job's shards; Interrupted once `stop` is set."""
    asked = job.config.run.workers
    here = asked if asked != "auto" else max(1, usable_cores() // ENCODER_THREADS)
    with connected(ENCODER_THREADS * min(here, len(job.shards))) as cluster:
        place = place_of_worker(job.config.encoder.device, cluster)
        most = len(job.shards) if asked == "auto" else asked
        RayPool(cluster, place, job_of_actors(job, place), most).run(stop, on_progress)


def job_of_actors(job: EncodeJob, place: Mapping[str, int]) -> EncodeJob:
    """Return the job with absolute paths and the actors' device."""
    config, recorded = job.config, job.config.recorded()
    source = replace(config.source, **{name: recorded["source"][name] for name in ("path", "images")})
    device = "cuda" if place["num_gpus"] else "cpu"
    encoder = replace(config.encoder, model=recorded["encoder"]["model"], device=device)
    config = replace(config, source=source, encoder=encoder)
    return replace(job, config=config, store=job.store.absolute())


@dataclass(eq=False)
class Worker:
    """An actor, from when it was asked for."""

    actor: Any
    said: Any
    """Lists of events, as they come."""
    placed: bool = False
    shards: set[int] = field(default_factory=set)
    """In its hands."""
    unfinished: int = 0
    """Samples that it has told of, beyond those of its finished shards."""


class RayPool:
    """Workers that come and go, and the shards that none of them has in hand."""

    def __init__(self, cluster: RayCluster, place: Mapping[str, int], job: EncodeJob, most: int) -> None:
        self._ray, self._cluster, self._place, self._most = cluster.ray, cluster, place, most
        self._slots, self._counted_at = 0, -math.inf
        """Of the cluster, when they were last counted."""
        self._actor = self._ray.remote(RayWorker).options(max_concurrency=CALLS, runtime_env=PASSIVE, **place)
        self._job = self._ray.put(replace(job, shards=()))
        self._shards = deque(job.shards)
        self._workers: list[Worker] = []
        self._lost = Counter[int | None]()
        """Workers that died, by the shards that they had; None for those that had not begun."""
        self._said_at = time.monotonic()
        self._head = ClusterHead(str(self._ray.get_runtime_context().gcs_address))

    def run(self, stop: threading.Event, on_progress: Callable[[Progress], None]) -> None:
        errors, over = self._ray.exceptions, threading.Event()
        threading.Thread(target=self._head.watch, args=[over], daemon=True).start()
        try:
            while self._shards or any(worker.shards for worker in self._workers):
                if stop.is_set():
                    raise Interrupted("the shards in hand were dropped; run the same command again to go on")
                self._grow_or_shrink()
                self._hear(on_progress)
        except errors.RayTaskError:
            raise  # a fault of ours, with its traceback
        except errors.RayError as error:
            if stop.is_set():  # a signal to all our processes ends a Ray of our own
                raise Interrupted("Ray ended too; run the same command again to go on") from None
            raise EncodeOnceError(f"Ray: {first_line(error)}; run the same command again to go on") from None
        finally:
            over.set()
            with suppress(errors.RayError):
                self._end()

    def _grow_or_shrink(self) -> None:
        """Have as many wait for a place as have one, so that a cluster that can grow does; none when nothing is left.

        Those that have their place go when they are told that no shard is left.
        """
        if not self._head.answers:
            return
        if time.monotonic() - self._counted_at > COUNTED_S:
            self._slots, self._counted_at = self._cluster.slots(self._place), time.monotonic()
        placed = sum(worker.placed for worker in self._workers)
        wanted = min(self._most, placed + len(self._shards), max(self._slots, 2 * placed))
        while len(self._workers) < wanted:
            actor = self._actor.remote()
            said = actor.work.options(num_returns="streaming").remote(self._job)
            self._workers.append(Worker(actor, said))
        for worker in [each for each in self._workers if not each.placed][: len(self._workers) - max(wanted, placed)]:
            self._dismiss(worker)
        if not placed and time.monotonic() - self._said_at > WAITING_SAID_S:
            self._said_at = time.monotonic()
            say_waiting(self._place, self._cluster.totals())

    def _hear(self, on_progress: Callable[[Progress], None]) -> None:
        """One message of each worker that has said something; a worker's failure becomes ours."""
        lines = [worker.said for worker in self._workers]
        self._ray.wait(lines, timeout=POLL_S)
        ready, _ = self._ray.wait(lines, num_returns=len(lines), timeout=0)
        for worker in [each for each in self._workers if each.said in ready]:
            for event in self._message(worker, on_progress):
                if event is None:
                    self._give(worker)
                elif isinstance(event, EncodeOnceError | OSError):
                    raise event
                else:
                    self._take_back(worker, event)
                    on_progress(event)

    def _message(self, worker: Worker, on_progress: Callable[[Progress], None]) -> list[Event]:
        try:
            said: list[Event] = self._ray.get(next(worker.said))
            worker.placed = True
            return said
        except StopIteration:
            self._dismiss(worker)
        except self._ray.exceptions.RayActorError as error:
            self._dismiss(worker)
            on_progress(Progress(samples=-worker.unfinished))  # others encode them again
            self._refuse_repeated_losses(worker, error)
        return []

    def _give(self, worker: Worker) -> None:
        """The next shard, or word that none is left; one that comes back later finds another worker."""
        shard = self._shards.popleft() if self._shards else None
        worker.actor.give.remote(shard)
        if shard is not None:
            worker.shards.add(shard)

    def _take_back(self, worker: Worker, done: Progress) -> None:
        worker.unfinished += done.samples
        if done.committed is not None:
            content = done.committed.content
            worker.shards.discard(content.shard)
            worker.unfinished -= content.cached + content.rejected
        if done.mismatched is not None:
            worker.shards.discard(done.mismatched.shard)
            worker.unfinished -= done.mismatched.samples.num_rows

    def _dismiss(self, worker: Worker) -> None:
        """End it; others get what it had in hand."""
        self._workers.remove(worker)
        self._shards.extendleft(sorted(worker.shards, reverse=True))
        self._ray.kill(worker.actor)

    def _refuse_repeated_losses(self, worker: Worker, error: Any) -> None:
        why = reason_of(error)
        if error.actor_init_failed:
            raise EncodeOnceError(f"Ray: a worker cannot start: {why}")
        had = in_hand(worker.shards)
        if not error.preempted:
            self._lost.update(worker.shards or [None])
        if self._lost and max(self._lost.values()) >= LOSSES:
            raise EncodeOnceError(
                f"{LOSSES} workers on Ray died, the last one {had}: {why}; committed shards are kept, run the same "
                "command again to go on"
            )
        log_info(printable(f"a worker on Ray was lost {had}, and another goes on: {why}"))

    def _end(self) -> None:
        """Let workers leave that have begun a shard; kill the others, and those too that do not leave in time."""
        encoding = [worker for worker in self._workers if worker.shards]
        for worker in encoding:
            worker.actor.drop.remote()
        if encoding:
            self._ray.wait([each.said.completed() for each in encoding], num_returns=len(encoding), timeout=GRACE_S)
        for worker in self._workers:
            self._ray.kill(worker.actor)


def in_hand(shards: Collection[int]) -> str:
    """What a worker that was lost had: `with shard 4 in hand`."""
    numbers = ", ".join(map(str, sorted(shards)))
    return f"with shard{'s' * (len(shards) > 1)} {numbers} in hand" if shards else "before it began"


def reason_of(error: Any) -> str:
    """The line of Ray's that says why, and its address, of a dozen about the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    address = "".join(f" (node {line.removeprefix('ip: ')})" for line in lines if line.startswith("ip: "))
    return lines[-1].partition(". ")[0] + address
