"""The actor that a worker is on Ray: no image and no sample leaves its node, only what it says of them."""

import importlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.layout import PLAN_FILE, SPEC_FILE
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.worker import Event, obey

TOLD_EVERY_S = 0.5
"""What happens within that time is one message: the driver hears two a second of each worker."""

ENDED = object()


class RayWorker:
    """Its calls come in threads of their own: `work` lasts as long as the worker, `give` and `drop` come meanwhile.

    It is the `Orders` of its own pipeline.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._shards = queue.SimpleQueue[int | None]()
        self._said = queue.SimpleQueue[Any]()

    def work(self, job: EncodeJob) -> Iterator[list[Event]]:
        """Build the shards that are given. Say at once that the worker has its place, and then what happens."""
        yield []
        with ThreadPoolExecutor(1) as encoding:
            ended = encoding.submit(self._encode, job)
            while (said := self._next())[-1] is not ENDED:
                yield said
            yield said[:-1]
            ended.result()

    def give(self, shard: int | None) -> None:
        """Hand out a shard that was asked for; None when there are no more."""
        self._shards.put(shard)

    def drop(self) -> None:
        """End, without the shard in hand."""
        self.stop.set()
        self._shards.put(None)

    def report(self, event: Event) -> None:
        self._said.put(event)

    def shards(self) -> Iterator[int]:
        self.report(None)
        while (shard := self._shards.get()) is not None:
            yield shard
            self.report(None)

    def _next(self) -> list[Any]:
        """What was said since the last time: steps are gathered, all else is told at once."""
        said, until = [self._said.get()], time.monotonic() + TOLD_EVERY_S
        while isinstance(said[-1], Progress) and (left := until - time.monotonic()) > 0:
            try:
                said.append(self._said.get(timeout=left))
            except queue.Empty:
                break
        return said

    def _encode(self, job: EncodeJob) -> None:
        try:
            refuse_unseen(job)
            obey(job, job.config.encoder, job.config.run.threads(workers_beside()), self)
        except (EncodeOnceError, OSError) as error:
            self.report(error)
        finally:
            self._said.put(ENDED)


def refuse_unseen(job: EncodeJob) -> None:
    """CacheError where this node's cache is not the one that was planned."""
    try:
        seen = job.store.has(PLAN_FILE) and job.store.has(SPEC_FILE) and read_spec(job.store) == job.spec
    except EncodeOnceError:
        seen = False
    if not seen:
        raise CacheError(
            f"node {os.uname().nodename} does not see the plan at {job.store.where(PLAN_FILE)}; on Ray, the cache, the "
            "images and the model lie where every node sees them, under the same path"
        )


def workers_beside() -> int:
    """How many workers like this one its node has room for, itself among them."""
    ray: Any = importlib.import_module("ray")
    here = ray.get_runtime_context()
    has = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here.get_node_id())
    asked = here.get_assigned_resources()
    kind = "GPU" if asked.get("GPU") else "CPU"
    return max(1, int(has[kind] // asked[kind]))
