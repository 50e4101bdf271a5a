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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from threading import Condition
from typing import Any

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, ConfigError, EncodeOnceError, Interrupted
from cache_store.format.layout import PLAN, SPEC_FILE, part_file
from cache_store.log import log_info
from cache_store.messages import printable
from cache_store.program.running import hold_stop_signals, usable_cores
from cache_store.storage.daemon_threads import STOP_REQUEST
from precompute.encode.coordinator import GRACE_S, Event, coordinate
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.worker import ENCODER_THREADS, Inbox, Report, start_worker

NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Ray's environment, unless set otherwise: it sends no usage statistics."""

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a Ray that we start: it listens on the loopback interface only, as on Windows and macOS."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Object store of a Ray that we start: small, because no pixels pass through it."""

TOKEN_HINT = "; if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
"""Added to the error if something answers but refuses us: Ray gives no reason then."""

PROBE_S = 5.0
"""Seconds for a cluster to answer; Ray itself would wait two minutes and ignore signals."""

WAITING = 8
"""Least actors that wait for a place, so that a cluster without workers grows quickly; later as many as have one."""

MAX_LOSSES = 3
"""Number of lost workers with the same shard that stops the build."""

CONCURRENT_CALLS = 5
"""Calls that an actor serves at a time: shards that are committed, encoded, waiting and just ended, and `drop`."""

PASSIVE = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Waiting OpenMP threads leave the cores to the decoders; `run_program` does the same for our other processes."""


def run_on_ray(job: EncodeJob, report: Report) -> None:
    """Build the job's shards; raise Interrupted once a stop is requested."""
    wanted, num_shards = job.config.run.workers, len(job.shards)
    on_this_machine = max(1, usable_cores() // ENCODER_THREADS) if wanted == "auto" else wanted
    with connected(ENCODER_THREADS * min(on_this_machine, num_shards)) as ray:
        resources = resources_of_worker(job.config.encoder.device, ray)
        most = num_shards if wanted == "auto" else wanted
        needs = "a GPU" if resources["num_gpus"] else f"{ENCODER_THREADS} CPUs"
        log_info(f"asking Ray for workers, each on {needs}; if none starts, `ray status` says why")
        try:
            coordinate(job, Actors(ray, resources, job_of_actors(job, resources), most), report)
        except ray.exceptions.RayTaskError:
            raise  # a bug of ours, with its traceback
        except ray.exceptions.RayError as error:
            if STOP_REQUEST.is_set():  # the signal also stopped the Ray that we started
                raise Interrupted("Ray stopped too; run the same command again to go on") from None
            raise EncodeOnceError(f"Ray: {brief(error)}; run the same command again to go on") from None


def job_of_actors(job: EncodeJob, resources: Mapping[str, int]) -> EncodeJob:
    """Return the job with absolute paths and the actors' device."""
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
                yield self._placed[-1], self._result(call, "before it began")
                continue
            actor, shard = self._calls[call]
            try:
                report = next(call)
            except StopIteration:
                del self._calls[call]
            else:
                yield actor, self._result(report, f"{MAX_LOSSES} times with shard {shard} in hand")

    def _grow_or_shrink(self, shards_left: int) -> None:
        """Let actors wait, so that the cluster can grow; if no shard is left, release those without one.

        A lost actor may need the place of another to finish its shards.
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
        """Return a call's report, if any; raise the worker's error, or one of ours if Ray has given up."""
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EncodeOnceError | OSError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayActorError as error:
            raise EncodeOnceError(
                f"a worker on Ray was lost {when}: {brief(error)}; committed shards are kept, run the same command "
                "again to go on"
            ) from None
        return result if isinstance(result, Progress) else None

    def give(self, worker: Any, shard: int) -> None:
        self._calls[worker.build.options(num_returns="streaming").remote(shard)] = worker, shard

    def end(self) -> None:
        """Let actors with a shard drop it and end; kill the others, and any that take longer than GRACE_S."""
        with suppress(self._ray.exceptions.RayError):
            for actor in {actor for actor, _ in self._calls.values()}:
                actor.drop.options(max_task_retries=0).remote()
            if ends := [call.completed() for call in self._calls]:
                self._ray.wait(ends, num_returns=len(ends), timeout=GRACE_S)
            for actor in (*self._waiting.values(), *self._placed):
                self._ray.kill(actor)


class RayWorker:
    """The actor of a worker, which starts with it; Ray runs each call in a thread of its own."""

    def __init__(self, job: EncodeJob) -> None:
        self._inbox, self._reports, self._news = Inbox(), dict[int, list[Progress]](), Condition()
        self._running = ThreadPoolExecutor(1).submit(self._run, job)
        self._running.add_done_callback(lambda _: self._report(Progress()))

    def _run(self, job: EncodeJob) -> None:
        refuse_unseen_plan(job)
        threads = job.config.run.threads(workers_on_this_node())
        start_worker(job, threads, self._inbox, self._report, lambda: None)

    def _report(self, progress: Progress) -> None:
        with self._news:
            if progress.shard is not None:
                self._reports[progress.shard].append(progress)
            self._news.notify_all()

    def build(self, shard: int) -> Iterator[Progress]:
        """Yield the reports of a shard, or raise the worker's error.

        Their number is always the same. So if Ray repeats the call, here or in a restarted actor, it can skip those
        that it has.
        """
        with self._news:
            if shard not in self._reports:
                self._reports[shard] = []
                self._inbox.put(shard)
        reports, sent = self._reports[shard], 0
        while not (sent and reports[sent - 1].ends_shard):
            with self._news:
                while sent == len(reports) and not self._running.done():
                    self._news.wait()
            if sent == len(reports):
                self._running.result()  # raises its error
                return
            yield reports[sent]
            sent += 1

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
    """Count the workers like this one that its node has room for, itself included."""
    ray: Any = importlib.import_module("ray")
    context = ray.get_runtime_context()
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    assigned = context.get_assigned_resources()
    kind = "GPU" if assigned.get("GPU") else "CPU"
    return max(1, int(total[kind] // assigned[kind]))


@contextmanager
def connected(cpus: int) -> Iterator[Any]:
    """Connect to the cluster at RAY_ADDRESS, or start a local one with `cpus` CPUs; yield the `ray` module.

    Raises EncodeOnceError if that fails. Ray shows the workers' logs, here on standard error.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    is_local = address == "local"
    for name, value in (NO_TELEMETRY | LOOPBACK_ONLY if is_local else NO_TELEMETRY).items():
        os.environ.setdefault(name, value)
    ray: Any = importlib.import_module("ray")
    options: dict[str, Any] = {"address": address, "logging_level": "error"}
    if is_local:
        log_info("RAY_ADDRESS is not set: starting Ray on this machine only")
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        refuse_no_answer(address)
    with redirect_stdout(sys.stderr):
        init_ray(ray, options)
        try:
            yield ray
        finally:
            ray.shutdown()


def refuse_unreachable_cluster() -> None:
    """Refuse an address as `connected` does, without importing Ray; call it before planning, which may take an hour."""
    if address := os.environ.get("RAY_ADDRESS"):
        refuse_no_answer(address)


def refuse_no_answer(address: str) -> None:
    """Raise EncodeOnceError within PROBE_S if nothing answers at the address, ConfigError if no build can use it."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        remedy = "from outside the cluster, run the build in it, by `ray job submit`"
        raise ConfigError(f"RAY_ADDRESS is {address}; expected HOST:PORT, or auto; {remedy}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise EncodeOnceError(f"RAY_ADDRESS: no Ray cluster answers at {address} ({error})") from None


def init_ray(ray: Any, options: Mapping[str, Any]) -> None:
    """Call `ray.init`; raise its errors as EncodeOnceError, and keep our signal handlers.

    Processes that Ray starts ignore SIGTERM, as they ignore Ctrl-C: batch systems send it to all processes, and if
    Ray's ended first, ours would fail in the middle of stopping. They end with ours, or when they are killed.
    """
    before = signal.getsignal(signal.SIGTERM)
    with hold_stop_signals():
        try:
            ray.init(**options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            remedy = TOKEN_HINT if isinstance(error, ConnectionError) else ""
            raise EncodeOnceError(f"Ray at {options['address']}: {brief(error)}{remedy}") from None
        finally:
            signal.signal(signal.SIGTERM, before)


def resources_of_worker(device: str, ray: Any) -> dict[str, int]:
    """Return a worker's Ray resources: a GPU, or ENCODER_THREADS cores for an encoder without one."""
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0)):
        return {"num_gpus": 1, "num_cpus": 0}
    return {"num_gpus": 0, "num_cpus": ENCODER_THREADS}


def brief(error: BaseException) -> str:
    """Return Ray's message, which may have many lines, as one line."""
    return printable(" ".join(str(error).split())).rstrip(".")
