"""Workers on this machine: one in this process, or several processes that ask for one shard after another.

A shard has one writer, and its bytes do not depend on which, so shards are handed out as workers become free. How many
workers feed the devices follows from cores, GPUs and memory, unless the config says a number.
"""

import contextlib
import multiprocessing
import os
import queue
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
from cache_store.program.running import ignore_stop_signals, stop_signals_held, usable_cores
from precompute.config import BuildConfig
from precompute.encode.canary import Canary
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encode.worker import ENCODER_THREADS, GRACE_S, POLL_S, Event, obey
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.sources import Source
from precompute.sources.archives.shared_index import LentIndexes

CORES_A_WORKER = 4
"""On a GPU: one that launches and writes, and some that decode. More in one process wait for Python's lock."""

WORKERS_A_GPU = 4
"""At most: each has the encoder's weights and a CUDA context of its own."""

CONTEXT_BYTES = 3 * 2**30
"""GPU memory of a worker, whatever its batch: context, weights, libraries' work space."""

BYTES_A_PIXEL = 4_096
"""GPU memory of a batch while it is encoded in bfloat16, for each of its pixels: some twenty tensors of
96 channels at full resolution, twice in float32. Calculated, not measured.
"""

HOST_BYTES = 4 * 2**30
"""Main memory of a worker: torch and CUDA, its batches, and for a minute the canary's weights."""


@dataclass(frozen=True)
class Crew:
    """Workers of one build on this machine."""

    workers: int
    sharing: int
    """By how many workers like these the machine's cores are shared: with those on GPUs that other ranks have."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that decide how many workers there are."""

    cores: int
    host_bytes: int
    gpus: int
    """That this process sees."""
    gpu_bytes: int
    """Free on each of them."""

    def workers_a_gpu(self, batch_pixels: int, *, is_float32: bool) -> int:
        """How many keep a GPU busy, of those that have cores and room."""
        needed = CONTEXT_BYTES + batch_pixels * BYTES_A_PIXEL * (2 if is_float32 else 1)
        by_cores = self.cores // self.gpus // CORES_A_WORKER
        by_host = self.host_bytes // self.gpus // HOST_BYTES
        return max(1, min(WORKERS_A_GPU, by_cores, by_host, self.gpu_bytes // needed))


def crew_of(config: BuildConfig, shards: int) -> Crew:
    """The workers that can have something to do."""
    device = config.encoder.torch_device
    if device.type != "cuda":
        wanted = config.run.workers
        workers = max(1, torch.get_num_threads() // ENCODER_THREADS) if wanted == "auto" else wanted
        return alone(min(workers, max(1, shards)))
    return crew_on_gpus(config, shards, this_machine(device))


def crew_on_gpus(config: BuildConfig, shards: int, machine: Machine) -> Crew:
    """Count the GPUs that the process sees, or the one it is told to use; each GPU has its share of the cores."""
    if config.run.workers != "auto":
        return alone(min(config.run.workers, max(1, shards)))
    used = machine.gpus if config.encoder.device in ("auto", "cuda") else 1
    if config.encoder.reads_text:  # nothing is decoded, and its weights are many: one keeps a GPU busy
        return Crew(min(used, max(1, shards)), machine.gpus)
    batch_pixels = config.encoder.batch_size * config.image.height * config.image.width
    a_gpu = machine.workers_a_gpu(batch_pixels, is_float32=config.encoder.compute_dtype == "float32")
    workers = min(used * a_gpu, max(1, shards))
    return Crew(workers, -(-workers // used) * machine.gpus)


def alone(workers: int) -> Crew:
    return Crew(workers, workers)


def this_machine(device: torch.device) -> Machine:
    return Machine(
        cores=usable_cores(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=torch.cuda.device_count(),
        gpu_bytes=torch.cuda.mem_get_info(device)[0],
    )


STOP = -1
"""Sent to a worker in place of a shard."""


def run_local(
    job: EncodeJob, source: Source, encoder: Encoder, stop: threading.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Build the job's shards; Interrupted once `stop` is set."""
    crew = crew_of(job.config, len(job.shards))
    if crew.workers == 1:
        torch.set_num_threads(ENCODER_THREADS)
        threads = job.config.run.threads(crew.sharing)
        with Canary(job.config.encoder, job.config.image.range) as canary:
            encode_shards(
                job,
                source,
                encoder,
                job.shards,
                decode_threads=threads,
                stop=stop,
                on_progress=on_progress,
                canary=canary,
            )
    else:
        WorkerPool(job, crew).run(stop, on_progress)


class WorkerPool:
    """Processes that each load the encoder and take shards until none are left.

    One pipe to each is all that they share: locks and queues between processes are semaphores, of which Python warns
    on the terminal once their maker has been killed.
    """

    def __init__(self, job: EncodeJob, crew: Crew) -> None:
        self._job, self._shards, self._crew = replace(job, shards=()), iter(job.shards), crew
        self._processes: dict[Connection, BaseProcess] = {}
        self._pipes: list[Connection] = []
        """To those that may still say something."""
        self._encoding = set[Connection]()
        """To those that have been given a shard, which a kill would leave half written."""

    def _start(self) -> None:
        # Not forked: loading an encoder may ask CUDA for its devices, after which no fork can use them.
        context, indexes = multiprocessing.get_context("spawn"), LentIndexes()
        for index in range(self._crew.workers):
            ours, theirs = context.Pipe()
            arguments = (index, self._job, self._crew.sharing, theirs, indexes)
            self._processes[ours] = context.Process(target=work, args=arguments, name=f"worker-{index}", daemon=True)
            self._processes[ours].start()
            self._pipes.append(ours)
            theirs.close()  # so that the pipe ends with the worker

    def run(self, stop: threading.Event, on_progress: Callable[[Progress], None]) -> None:
        resource_tracker.ensure_running()  # spawning would start it, and it lets signals through as it starts
        with stop_signals_held():
            self._start()
        try:
            while any(process.is_alive() for process in self._processes.values()):
                if stop.is_set():
                    raise Interrupted("the shards in hand were dropped; run the same command again to go on")
                self._refuse_dead_workers()
                self._pass_on(on_progress, POLL_S)
            self._refuse_dead_workers()
            while self._pass_on(on_progress, 0.0):
                pass
        finally:
            self._end()

    def _pass_on(self, on_progress: Callable[[Progress], None], timeout_s: float) -> bool:
        """What workers say, if anything; a worker's failure becomes ours."""
        said = self._hear(timeout_s)
        for pipe, event in said:
            if event is None:
                self._encoding.add(pipe)
                self._tell(pipe, next(self._shards, None))
            elif isinstance(event, EncodeOnceError | OSError):
                raise event
            else:
                on_progress(event)
        return bool(said)

    def _hear(self, timeout_s: float) -> list[tuple[Connection, Event]]:
        """One event of each worker that has said something."""
        said = []
        for pipe in wait(self._pipes, timeout_s):
            assert isinstance(pipe, Connection)
            try:
                said.append((pipe, pipe.recv()))
            except (EOFError, OSError):  # it has ended, perhaps in the middle of a word
                self._pipes.remove(pipe)
        return said

    def _tell(self, pipe: Connection, order: int | None) -> None:
        with contextlib.suppress(OSError):  # it has ended
            pipe.send(order)

    def _end(self) -> None:
        """Let workers leave that have begun a shard; kill the others, and those too that do not leave in time."""
        for pipe, process in self._processes.items():
            if pipe in self._encoding:
                self._tell(pipe, STOP)
            else:
                process.kill()
        deadline = time.monotonic() + GRACE_S
        while any(process.is_alive() for process in self._processes.values()) and time.monotonic() < deadline:
            self._hear(POLL_S)  # a full pipe would keep workers from leaving
        for process in self._processes.values():
            process.kill()
            process.join()

    def _refuse_dead_workers(self) -> None:
        for process in self._processes.values():
            if process.exitcode:
                why = " (killed, often for want of memory)" if process.exitcode == -signal.SIGKILL else ""
                raise EncodeOnceError(
                    f"{process.name} died with exit code {process.exitcode}{why}; "
                    "committed shards are kept, run the same command again to go on"
                )


class PipedOrders:
    """A worker's end of its pipe: shards come when they are asked for, and the order to stop at any time.

    The pipe ends with the parent, and this process then ends at once: a killed parent cannot say that its workers are
    to stop, and a rerun must not meet a second writer.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._speaking = pipe, threading.Lock()
        self._shards = queue.SimpleQueue[int | None]()
        self.stop = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with ending_with_parent():
            while (order := self._pipe.recv()) != STOP:
                self._shards.put(order)
            self.stop.set()
            self._shards.put(None)
            self._pipe.recv()  # for its end

    def report(self, event: Event) -> None:
        with ending_with_parent(), self._speaking:  # the thread that writes shards speaks too
            self._pipe.send(event)

    def shards(self) -> Iterator[int]:
        self.report(None)
        while (shard := self._shards.get()) is not None:
            yield shard
            self.report(None)


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        os._exit(1)


def work(index: int, job: EncodeJob, sharing: int, pipe: Connection, indexes: None) -> None:
    """A worker process's body; ends when no shard is left, when told to stop, or when its parent is gone.

    The parent's `indexes` are taken as they arrive.
    """
    ignore_stop_signals()
    obey(job, worker_encoder(job.config.encoder, index), job.config.run.threads(sharing), PipedOrders(pipe))


def worker_encoder(config: EncoderConfig, index: int) -> EncoderConfig:
    """Each worker takes a GPU of its own, as far as there are any."""
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{index % torch.cuda.device_count()}")
    return config
