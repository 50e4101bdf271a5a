"""Workers as actors on a Ray cluster: one for each GPU, or for every two CPU cores.

Images and samples do not pass through Ray, only numbers of shards and reports. Ray places actors, starts nodes for
those that wait, restarts the lost ones and gives them their shards again. A lost node may still be writing, so files
are only created where none exist, as ranks do.
"""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, ConfigError, EncodeOnceError
from cache_store.format.layout import PLAN, SPEC_FILE, part_file
from cache_store.log import log_info
from cache_store.messages import printable
from precompute.config import BuildConfig
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.worker import ENCODER_THREADS, GRACE_S, Event, Inbox, Report, coordinate, start_worker

TOKEN_HINT = "; if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
"""Added to the error if something answers but refuses us: Ray gives no reason then."""

PROBE_S = 5.0
"""Seconds for a cluster to answer; Ray itself would wait two minutes and ignore signals."""

WAITING = 8
"""Least actors that wait for a place, so that a cluster without workers grows quickly; later as many as have one."""

MAX_LOSSES = 3
"""Number of lost workers with the same shard that stops the build."""

CONCURRENT_CALLS = 4
"""Calls that an actor serves at a time: two shards, `drop`, and one that Ray repeats."""

PASSIVE = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Waiting OpenMP threads leave the cores to the decoders; `run_program` does the same for our other processes."""


def run_on_ray(job: EncodeJob, report: Report) -> None:
    """Build the job's shards; raise Interrupted once a stop is requested."""
    with connected() as ray:
        resources = resources_of_worker(job.config.encoder.device, ray)
        most = len(job.shards) if job.config.run.workers == "auto" else job.config.run.workers
        needs = "a GPU" if resources["num_gpus"] else f"{ENCODER_THREADS} CPUs"
        log_info(f"asking Ray for workers, each on {needs}; if none starts, `ray status` says why")
        try:
            coordinate(job, Actors(ray, resources, job_of_actors(job, resources), most), report)
        except ray.exceptions.RayTaskError:
            raise  # a bug of ours, with its traceback
        except ray.exceptions.RayError as error:
            raise EncodeOnceError(f"Ray: {brief(error)}; run the same command again to go on") from None


def job_of_actors(job: EncodeJob, resources: Mapping[str, int]) -> EncodeJob:
    config, recorded = job.config, job.config.recorded()
    source = replace(config.source, **{name: recorded["source"][name] for name in ("path", "images")})
    device = "cuda" if resources["num_gpus"] else "cpu"
    encoder = replace(config.encoder, model=recorded["encoder"]["model"], device=device)
    return replace(job, config=replace(config, source=source, encoder=encoder), store=job.store.absolute())


class Actors:
    """Workers as actors, which may come and go; a call of `RayWorker.build` for each shard given to one."""

    def __init__(self, ray: Any, resources: Mapping[str, int], job: EncodeJob, most: int) -> None:
        self._ray, self._most, self._job = ray, most, replace(job, shards=())
        self._actor = ray.remote(RayWorker).options(
            max_restarts=-1,
            max_task_retries=MAX_LOSSES - 1,
            max_concurrency=CONCURRENT_CALLS,
            runtime_env=PASSIVE,
            **resources,
        )
        self._waiting: dict[Any, Any] = {}
        """Actors without a place, by the call that returns when they have one."""
        self._placed: list[Any] = []
        self._calls: dict[Any, tuple[Any, int]] = {}
        """Actor and shard of each call."""

    def events(self, shards_left: int, timeout_s: float) -> Iterator[tuple[Any, Event]]:
        self._grow_or_shrink(shards_left)
        calls = [*self._waiting, *self._calls]
        self._ray.wait(calls, timeout=timeout_s)
        for call in self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]:
            if call in self._waiting:
                self._placed.append(self._waiting.pop(call))
                self._result(call, "before it began")
                yield self._placed[-1], None
            else:
                actor, shard = self._calls.pop(call)
                for report in self._result(call, f"{MAX_LOSSES} times with shard {shard} in hand"):
                    yield actor, report

    def _grow_or_shrink(self, shards_left: int) -> None:
        """Let actors wait, so that the cluster can grow; if no shard is left, release them: a lost one may need the
        place.
        """
        busy = [actor for actor, _ in self._calls.values()]
        if not shards_left:
            for actor in [*self._waiting.values(), *(each for each in self._placed if each not in busy)]:
                self._ray.kill(actor)
            self._waiting, self._placed = {}, [each for each in self._placed if each in busy]
            return
        wanted = min(self._most - len(self._placed), max(WAITING, len(self._placed)), shards_left)
        while len(self._waiting) < wanted:
            actor = self._actor.remote(self._job)
            self._waiting[actor.__ray_ready__.remote()] = actor

    def _result(self, call: Any, when: str) -> Any:
        """Return a call's result; raise the worker's error, or one of ours if Ray has given up."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EncodeOnceError | OSError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayActorError as error:
            raise EncodeOnceError(
                f"a worker on Ray was lost {when}: {brief(error)}; committed shards are kept, run the same command "
                "again to go on"
            ) from None

    def give(self, worker: Any, shard: int) -> None:
        self._calls[worker.build.remote(shard)] = worker, shard

    def end(self) -> None:
        """Let actors with a shard drop it and end; kill the others, and any that take longer than GRACE_S."""
        with suppress(self._ray.exceptions.RayError):
            for actor in {actor for actor, _ in self._calls.values()}:
                actor.drop.options(max_task_retries=0).remote()
            if self._calls:
                self._ray.wait([*self._calls], num_returns=len(self._calls), timeout=GRACE_S)
            for actor in (*self._waiting.values(), *self._placed):
                self._ray.kill(actor)


class RayWorker:
    """The actor of a worker, which starts with it; Ray runs each call in a thread of its own."""

    def __init__(self, job: EncodeJob) -> None:
        self._inbox, self._reports, self._ended = Inbox(), dict[int, list[Progress]](), dict[int, Future[None]]()
        self._running = ThreadPoolExecutor(1).submit(self._run, job)

    def _run(self, job: EncodeJob) -> None:
        refuse_unseen_plan(job)
        threads = job.config.run.threads(workers_on_this_node())
        start_worker(job, threads, self._inbox, self._report, lambda: None)

    def _report(self, progress: Progress) -> None:
        if progress.shard is not None:
            self._reports[progress.shard].append(progress)
            if progress.ends_shard:
                self._ended[progress.shard].set_result(None)

    def build(self, shard: int) -> list[Progress]:
        """Build a shard and return its reports, or raise the worker's error; Ray may repeat the call."""
        if shard not in self._reports:
            self._reports[shard], self._ended[shard] = [], Future()
            self._inbox.put(shard)
        wait([self._running, self._ended[shard]], return_when=FIRST_COMPLETED)
        if not self._ended[shard].done():
            self._running.result()  # raises its error
        return self._reports[shard]

    def drop(self) -> None:
        self._inbox.drop()


def refuse_unseen_plan(job: EncodeJob) -> None:
    """Raise CacheError if this node does not see the planned cache."""
    try:
        seen = job.store.has(part_file(0)) and job.store.has(SPEC_FILE) and read_spec(job.store) == job.spec
    except EncodeOnceError:
        seen = False
    if not seen:
        raise CacheError(
            f"node {os.uname().nodename} does not see the plan at {job.store.where(PLAN)}; on Ray, every node "
            "must see the cache, the images and the model under the same paths"
        )


def workers_on_this_node() -> int:
    ray: Any = importlib.import_module("ray")
    context = ray.get_runtime_context()
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    assigned = context.get_assigned_resources()
    kind = "GPU" if assigned.get("GPU") else "CPU"
    return max(1, int(total[kind] // assigned[kind]))


@contextmanager
def connected() -> Iterator[Any]:
    """Connect to the cluster at RAY_ADDRESS; yield the `ray` module. Raises EncodeOnceError if that fails."""
    ray: Any = importlib.import_module("ray")
    address, before = os.environ["RAY_ADDRESS"], signal.getsignal(signal.SIGTERM)  # Ray sets its own
    with redirect_stdout(sys.stderr):
        try:
            ray.init(address=address, logging_level="error")
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            remedy = TOKEN_HINT if isinstance(error, ConnectionError) else ""
            raise EncodeOnceError(f"Ray at {address}: {brief(error)}{remedy}") from None
        finally:
            signal.signal(signal.SIGTERM, before)
        try:
            yield ray
        finally:
            ray.shutdown()


def refuse_unreachable_workers(config: BuildConfig) -> None:
    """Raise within PROBE_S, before planning, if nothing answers at RAY_ADDRESS; Ray is not imported."""
    address = os.environ.get("RAY_ADDRESS", "")
    if config.run.engine != "ray" or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        raise ConfigError(
            f"run.engine: ray needs a cluster, but RAY_ADDRESS is {address or 'not set'}; expected HOST:PORT, or auto "
            "for one on this machine (`ray start --head`); from outside, run the build in it, by `ray job submit`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise EncodeOnceError(f"RAY_ADDRESS: no Ray cluster answers at {address} ({error})") from None


def resources_of_worker(device: str, ray: Any) -> dict[str, int]:
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0)):
        return {"num_gpus": 1, "num_cpus": 0}
    return {"num_gpus": 0, "num_cpus": ENCODER_THREADS}


def brief(error: BaseException) -> str:
    return printable(" ".join(str(error).split())).rstrip(".")
