"""The Ray actor of a worker: images and samples do not pass through Ray, only events about them."""

import importlib
import os
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.layout import PLAN_FILE, SPEC_FILE
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.worker import Event, WorkerChannel, run_worker

MESSAGE_INTERVAL_S = 0.5
"""Progress within this time is sent as one message, so the driver gets about two a second from each worker."""

ENDED = object()


class RayWorker(WorkerChannel):
    """An actor that builds shards, and the channel of its own pipeline.

    Ray runs each call in its own thread: `work` lasts as long as the actor; `give` and `drop` come meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events = queue.SimpleQueue[Any]()

    def work(self, job: EncodeJob) -> Iterator[list[Event]]:
        """Build the shards from `give`; yield an empty list once the actor is placed, then lists of events."""
        yield []
        with ThreadPoolExecutor(1) as encoding:
            ended = encoding.submit(self._encode, job)
            while (events := self._next_events())[-1] is not ENDED:
                yield events
            yield events[:-1]
            ended.result()

    def report(self, event: Event) -> None:
        self._events.put(event)

    def _next_events(self) -> list[Any]:
        """Return the next events: collect progress for MESSAGE_INTERVAL_S, and pass on any other event at once."""
        events, until = [self._events.get()], time.monotonic() + MESSAGE_INTERVAL_S
        while isinstance(events[-1], Progress) and (left := until - time.monotonic()) > 0:
            try:
                events.append(self._events.get(timeout=left))
            except queue.Empty:
                break
        return events

    def _encode(self, job: EncodeJob) -> None:
        try:
            refuse_unseen_plan(job)
            run_worker(job, job.config.encoder, job.config.run.threads(workers_on_this_node()), self)
        except (EncodeOnceError, OSError) as error:
            self.report(error)
        finally:
            self._events.put(ENDED)


def refuse_unseen_plan(job: EncodeJob) -> None:
    """Raise CacheError if this node does not see the planned cache."""
    try:
        seen = job.store.has(PLAN_FILE) and job.store.has(SPEC_FILE) and read_spec(job.store) == job.spec
    except EncodeOnceError:
        seen = False
    if not seen:
        raise CacheError(
            f"node {os.uname().nodename} does not see the plan at {job.store.where(PLAN_FILE)}; on Ray, every node "
            "must see the cache, the images and the model under the same paths"
        )


def workers_on_this_node() -> int:
    """Count the workers like this one that its node has room for, itself included."""
    ray: Any = importlib.import_module("ray")
    context = ray.get_runtime_context()
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    assigned = context.get_assigned_resources()
    kind = "GPU" if assigned.get("GPU") else "CPU"
    return max(1, int(total[kind] // assigned[kind]))
