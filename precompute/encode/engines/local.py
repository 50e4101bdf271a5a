"""Workers on this machine: one in this process, or several processes that take shards from one queue.

A shard has one writer, whoever it is, and its bytes do not depend on which: so shards are handed out as workers
become free.
"""

import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.format.schema import Spec
from cache_store.program.processes import obey_parent_alone, stop_signals_held
from cache_store.refusal import differing, refuse
from precompute.config import BuildConfig
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decoder_messages import silence_decoders
from precompute.sources import Source, open_source

POLL_S = 0.2

ENCODER_THREADS = 2
"""Of each worker's encoder on a CPU, always: a larger machine has more workers. oneDNN orders some convolutions by the
number of threads (torch 2.13: images of 32 x 40 pixels differ between 1, 2 and 4 threads, of 64 x 128 between 4 and 8),
and bytes must not depend on how many workers share how many cores.
"""

GRACE_S = 10.0
"""For a worker to notice that it is to stop: a batch, on a GPU."""


def num_workers(config: BuildConfig, shards: int) -> int:
    """Workers that can have something to do."""
    if config.run.workers != "auto":
        return min(config.run.workers, shards)
    if config.encoder.torch_device.type == "cuda":
        gpus = torch.cuda.device_count() if config.encoder.device in ("auto", "cuda") else 1
        return min(gpus, shards)
    return max(1, min(torch.get_num_threads() // ENCODER_THREADS, shards))


def run_local(
    job: EncodeJob, source: Source, encoder: Encoder, stop: threading.Event, on_progress: Callable[[Progress], None]
) -> None:
    """Build the job's shards; Interrupted once `stop` is set."""
    workers = num_workers(job.config, len(job.shards))
    if workers == 1:
        torch.set_num_threads(ENCODER_THREADS)
        threads = job.config.run.threads(1)
        encode_shards(job, source, encoder, job.shards, decode_threads=threads, stop=stop, on_progress=on_progress)
    else:
        WorkerPool(job, workers).run(stop, on_progress)


class WorkerPool:
    """Processes that each load the encoder and take shards until none are left."""

    def __init__(self, job: EncodeJob, workers: int) -> None:
        # Not forked: importing diffusers asks CUDA for its devices, after which no fork can use them.
        context = multiprocessing.get_context("spawn")
        self._shards: Any = context.Queue()
        self._events: Any = context.Queue()
        self._stop = context.Event()
        for shard in [*job.shards, *[None] * workers]:  # a None tells one worker that there is no more
            self._shards.put(shard)
        arguments = (job, workers, self._shards, self._events, self._stop)
        self._processes: list[BaseProcess] = [
            context.Process(target=work, args=(index, *arguments), name=f"worker-{index}", daemon=True)
            for index in range(workers)
        ]

    def run(self, stop: threading.Event, on_progress: Callable[[Progress], None]) -> None:
        with stop_signals_held():
            for process in self._processes:
                process.start()
        try:
            while any(process.is_alive() for process in self._processes):
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
        """One event, if there is one; a worker's failure becomes ours."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return False
        if isinstance(event, EncodeOnceError | OSError):
            raise event
        on_progress(event)
        return True

    def _end(self) -> None:
        """Let workers leave; kill those that do not in time, which loses at most the shards in hand."""
        self._stop.set()
        deadline = time.monotonic() + GRACE_S
        while any(process.is_alive() for process in self._processes) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=POLL_S)  # a full pipe would keep workers from leaving
        for process in self._processes:
            process.kill()
            process.join()
        self._shards.cancel_join_thread()  # shards that nobody took may still wait to be sent

    def _refuse_dead_workers(self) -> None:
        for process in self._processes:
            if process.exitcode:
                raise EncodeOnceError(
                    f"{process.name} died with exit code {process.exitcode} (-9: killed, often for want of memory); "
                    "committed shards are kept, run the same command again to go on"
                )


def work(index: int, job: EncodeJob, workers: int, shards: Any, events: Any, stop: Any) -> None:
    """A worker process's body; ends when no shard is left, when told to stop, or when its parent is gone."""
    obey_parent_alone()
    torch.set_num_threads(ENCODER_THREADS)
    silence_decoders()
    try:
        encoder = load_encoder(worker_encoder(job.config.encoder, index), job.config.image.range)
        refuse_other_encoder(encoder, job.spec)
        encode_shards(
            job,
            open_source(job.config.source),
            encoder,
            iter(shards.get, None),
            decode_threads=job.config.run.threads(workers),
            stop=stop,
            on_progress=events.put,
        )
    except Interrupted:
        pass  # the parent knows: it told us to stop
    except (EncodeOnceError, OSError) as error:
        events.put(error)
    events.close()
    events.join_thread()


def refuse_other_encoder(encoder: Encoder, spec: Spec) -> None:
    if encoder.identity != spec.array.encoder:
        planned, loaded = (msgspec.to_builtins(each) for each in (spec.array.encoder, encoder.identity))
        summary = "encoder.model changed while the build was starting"
        refuse(summary, differing(planned, loaded), ["run the same command again"], held="when planned")


def worker_encoder(config: EncoderConfig, index: int) -> EncoderConfig:
    """Each worker takes a GPU of its own, as far as there are any."""
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{index % torch.cuda.device_count()}")
    return config
