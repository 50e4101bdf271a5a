"""Workers on this machine: one in this process, or several processes that ask for one shard after another.

Each shard has one writer, and its bytes do not depend on which worker that is, so shards are handed out as workers
become free. The number of workers follows from cores, GPUs and memory, unless the config sets it.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.program.running import hold_stop_signals, ignore_stop_signals, usable_cores
from cache_store.storage.daemon_threads import POLL_S
from precompute.config import BuildConfig
from precompute.encode.canary import Canary
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encode.worker import ENCODER_THREADS, GRACE_S, Event, WorkerChannel, run_worker
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.sources import Source

CORES_A_WORKER = 4
"""Cores of a worker on a GPU: one launches and writes, the others decode. More would wait for Python's lock."""

WORKERS_A_GPU = 4
"""Most workers on a GPU: each has its own CUDA context and copy of the encoder's weights."""

CONTEXT_BYTES = 3 * 2**30
"""GPU memory of a worker without its batches: context, weights, libraries' work space."""

BYTES_A_PIXEL = 4_096
"""GPU memory of a batch, for each of its pixels, while it is encoded in bfloat16: some twenty tensors of 96 channels
at full resolution; float32 takes twice as much. Calculated, not measured.
"""

HOST_BYTES = 4 * 2**30
"""Main memory of a worker: torch and CUDA, its batches, and for a minute the canary's weights."""


@dataclass(frozen=True)
class Crew:
    """Workers of one build on this machine."""

    workers: int
    sharing: int
    """Number of such workers that share the machine's cores, including those on GPUs of other ranks."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that decide how many workers there are."""

    cores: int
    host_bytes: int
    gpus: int
    """GPUs that this process sees."""
    gpu_bytes: int
    """Free memory of each GPU."""

    def workers_a_gpu(self, batch_pixels: int, *, is_float32: bool) -> int:
        """Return how many workers a GPU gets: as many as cores and memory allow, from 1 to WORKERS_A_GPU."""
        needed = CONTEXT_BYTES + batch_pixels * BYTES_A_PIXEL * (2 if is_float32 else 1)
        by_cores = self.cores // self.gpus // CORES_A_WORKER
        by_host = self.host_bytes // self.gpus // HOST_BYTES
        return max(1, min(WORKERS_A_GPU, by_cores, by_host, self.gpu_bytes // needed))


def crew_of(config: BuildConfig, shards: int) -> Crew:
    """Choose the number of workers, at most one per shard."""
    device = config.encoder.torch_device
    if device.type == "cuda":
        return crew_on_gpus(config, shards, measure_machine(device))
    wanted = config.run.workers
    workers = max(1, torch.get_num_threads() // ENCODER_THREADS) if wanted == "auto" else wanted
    workers = min(workers, max(1, shards))
    return Crew(workers, workers)


def crew_on_gpus(config: BuildConfig, shards: int, machine: Machine) -> Crew:
    """Choose the workers for the GPUs that the process sees, or for the one that the config names.

    Each GPU of the machine gets its share of the cores.
    """
    most = max(1, shards)
    if config.run.workers != "auto":
        workers = min(config.run.workers, most)
        return Crew(workers, workers)
    used = machine.gpus if config.encoder.device in ("auto", "cuda") else 1
    if config.encoder.reads_text:  # nothing is decoded, and the weights are large: one worker keeps a GPU busy
        return Crew(min(used, most), machine.gpus)
    batch_pixels = config.encoder.batch_size * config.image.height * config.image.width
    a_gpu = machine.workers_a_gpu(batch_pixels, is_float32=config.encoder.compute_dtype == "float32")
    workers = min(used * a_gpu, most)
    return Crew(workers, -(-workers // used) * machine.gpus)


def measure_machine(device: torch.device) -> Machine:
    return Machine(
        cores=usable_cores(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=torch.cuda.device_count(),
        gpu_bytes=torch.cuda.mem_get_info(device)[0],
    )


STOP = -1
"""Sent to a worker in place of a shard: drop the unfinished shard and end."""


def run_local(
    job: EncodeJob, source: Source, encoder: Encoder, stop: threading.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Build the job's shards; raise Interrupted once `stop` is set."""
    crew = crew_of(job.config, len(job.shards))
    if crew.workers == 1:
        torch.set_num_threads(ENCODER_THREADS)
        with Canary(job.config.encoder, job.config.image.range) as canary:
            encode_shards(
                job,
                source,
                encoder,
                job.shards,
                decode_threads=job.config.run.threads(crew.sharing),
                stop=stop,
                on_progress=on_progress,
                canary=canary,
            )
    else:
        WorkerPool(job, crew).run(stop, on_progress)


class WorkerPool:
    """Processes that each load the encoder and take shards until none are left.

    Each process shares only a pipe with this one. Locks and queues between processes use semaphores, and Python prints
    a warning about those if this process is killed.
    """

    def __init__(self, job: EncodeJob, crew: Crew) -> None:
        self._job, self._shards, self._crew = replace(job, shards=()), iter(job.shards), crew
        self._processes: dict[Connection, BaseProcess] = {}
        self._pipes: list[Connection] = []
        """Pipes of workers that may still send an event."""
        self._encoding = set[Connection]()
        """Pipes of workers that have asked for a shard; a kill would leave it half written."""

    def _start(self) -> None:
        # Spawned, not forked: loading an encoder may initialise CUDA, which a forked child then cannot use.
        context = multiprocessing.get_context("spawn")
        for index in range(self._crew.workers):
            ours, theirs = context.Pipe()
            arguments = (index, self._job, self._crew.sharing, theirs)
            self._processes[ours] = context.Process(
                target=run_worker_process, args=arguments, name=f"worker-{index}", daemon=True
            )
            self._processes[ours].start()
            self._pipes.append(ours)
            theirs.close()  # so that our end closes when the worker dies

    def run(self, stop: threading.Event, on_progress: Callable[[Progress], None]) -> None:
        resource_tracker.ensure_running()  # spawning would start it in the block below, and that lets signals through
        with hold_stop_signals():
            self._start()
        try:
            while any(process.is_alive() for process in self._processes.values()):
                if stop.is_set():
                    raise Interrupted("unfinished shards were dropped; run the same command again to go on")
                self._refuse_dead_workers()
                self._handle_events(on_progress, POLL_S)
            self._refuse_dead_workers()
            while self._handle_events(on_progress, 0.0):
                pass
        finally:
            self._end()

    def _handle_events(self, on_progress: Callable[[Progress], None], timeout_s: float) -> bool:
        """Handle one event of each worker that sent any; return whether one did. Raise a worker's failure."""
        events = self._receive(timeout_s)
        for pipe, event in events:
            if event is None:
                self._encoding.add(pipe)
                self._send(pipe, next(self._shards, None))
            elif isinstance(event, EncodeOnceError | OSError):
                raise event
            else:
                on_progress(event)
        return bool(events)

    def _receive(self, timeout_s: float) -> list[tuple[Connection, Event]]:
        """Receive one event from each worker that sent one."""
        events = []
        for pipe in wait(self._pipes, timeout_s):
            assert isinstance(pipe, Connection)
            try:
                events.append((pipe, pipe.recv()))
            except (EOFError, OSError):  # the worker ended, perhaps in the middle of a message
                self._pipes.remove(pipe)
        return events

    def _send(self, pipe: Connection, order: int | None) -> None:
        with contextlib.suppress(OSError):  # the worker ended
            pipe.send(order)

    def _end(self) -> None:
        """Let workers with a shard drop it and end; kill the others, and any that take longer than GRACE_S."""
        for pipe, process in self._processes.items():
            if pipe in self._encoding:
                self._send(pipe, STOP)
            else:
                process.kill()
        deadline = time.monotonic() + GRACE_S
        while any(process.is_alive() for process in self._processes.values()) and time.monotonic() < deadline:
            self._receive(POLL_S)  # a full pipe would keep a worker from ending
        for process in self._processes.values():
            process.kill()
            process.join()

    def _refuse_dead_workers(self) -> None:
        for process in self._processes.values():
            if process.exitcode:
                why = " (killed, often because memory ran out)" if process.exitcode == -signal.SIGKILL else ""
                raise EncodeOnceError(
                    f"{process.name} died with exit code {process.exitcode}{why}; "
                    "committed shards are kept, run the same command again to go on"
                )


class PipeChannel(WorkerChannel):
    """A worker's end of its pipe: it receives shards on request, and STOP at any time.

    When the parent dies, the pipe closes and this process ends at once: a killed parent cannot stop its workers, and a
    rerun must not find a second writer.
    """

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._sending = pipe, threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with ending_with_parent():
            while (order := self._pipe.recv()) != STOP:
                self.give(order)
            self.drop()
            self._pipe.recv()  # raises once the parent has ended

    def report(self, event: Event) -> None:
        with ending_with_parent(), self._sending:  # the thread that writes shards reports too
            self._pipe.send(event)


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """End this process if its parent has closed the pipe."""
    try:
        yield
    except (EOFError, OSError):
        os._exit(1)


def run_worker_process(index: int, job: EncodeJob, sharing: int, pipe: Connection) -> None:
    """Build shards in this process until none is left, it is told to stop, or its parent is gone.

    Unpickling `indexes` lends this process the parent's.
    """
    ignore_stop_signals()
    run_worker(job, worker_encoder(job.config.encoder, index), job.config.run.threads(sharing), PipeChannel(pipe))


def worker_encoder(config: EncoderConfig, index: int) -> EncoderConfig:
    """Assign GPUs to workers in turn, unless the config names a device or there is no GPU."""
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{index % torch.cuda.device_count()}")
    return config
