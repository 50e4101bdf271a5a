"""Launch a build's workers: in this process, in processes of this machine, or as actors on a Ray cluster."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.program.running import hold_stop_signals, ignore_stop_signals
from cache_store.storage.threads import POLL_S
from precompute.encode.crew import crew_of
from precompute.encode.job import EncodeJob
from precompute.encode.ray_actors import run_on_ray
from precompute.encode.worker import GRACE_S, Event, Inbox, Report, coordinate, run_worker, start_worker
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.sources.images import Source

STOP = -1
"""Sent to a worker in place of a shard: drop the unfinished shards and end."""


def run_workers(job: EncodeJob, source: Source, encoder: Encoder, report: Report) -> None:
    """Build the job's shards, in this process, in others or on Ray; Interrupted once a stop is requested."""
    if job.config.run.engine == "ray":
        run_on_ray(job, report)
        return
    workers, sharing = crew_of(job.config, len(job.shards))
    threads = job.config.run.threads(sharing)
    if workers == 1:
        run_worker(job, source, encoder, [job.shards], threads, report)
    else:
        coordinate(job, Processes(job, workers, threads), report)


class Processes:
    """Workers in processes of this machine, each on a pipe: Python would warn of leaked locks if this one is killed."""

    def __init__(self, job: EncodeJob, workers: int, threads: int) -> None:
        self._processes: dict[Connection, BaseProcess] = {}
        # Spawned, not forked: loading an encoder may initialise CUDA, which a forked child then cannot use.
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # spawning would start it in the block below, and that lets signals through
        with hold_stop_signals():
            for index in range(workers):
                ours, theirs = context.Pipe()
                config = replace(job.config, encoder=encoder_of_worker(job.config.encoder, index))
                arguments = (replace(job, config=config), threads, theirs)
                process = context.Process(target=run_process, args=arguments, name=f"worker-{index}", daemon=True)
                process.start()
                self._processes[ours] = process
                theirs.close()  # so that our end closes when the worker dies

    def events(self, shards_left: int, timeout_s: float) -> Iterator[tuple[Connection, Event]]:
        """Yield a message of each worker that sent one; raise a worker's error, or say that it died."""
        for pipe in receivable([*self._processes], timeout_s):
            try:
                event = pipe.recv()
            except (EOFError, OSError):  # perhaps in the middle of a message
                raise death_of(self._processes[pipe]) from None
            if isinstance(event, Exception):
                raise event
            yield pipe, event

    def give(self, worker: Connection, shard: int) -> None:
        with contextlib.suppress(OSError):  # the worker died
            worker.send(shard)

    def end(self) -> None:
        """Let workers drop their unfinished shards and end; kill those that outlast GRACE_S."""
        for pipe in self._processes:
            self.give(pipe, STOP)
        pipes, deadline = [*self._processes], time.monotonic() + GRACE_S
        while pipes and time.monotonic() < deadline:  # a full pipe would keep a worker from ending
            for pipe in receivable(pipes, POLL_S):
                try:
                    pipe.recv()
                except (EOFError, OSError):
                    pipes.remove(pipe)
        for process in self._processes.values():
            process.kill()
            process.join()


def receivable(pipes: list[Connection], timeout_s: float) -> list[Connection]:
    return [pipe for pipe in wait(pipes, timeout_s) if isinstance(pipe, Connection)]


def death_of(process: BaseProcess) -> EncodeOnceError:
    process.join()
    why = " (killed, often because memory ran out)" if process.exitcode == -signal.SIGKILL else ""
    return EncodeOnceError(
        f"{process.name} died with exit code {process.exitcode}{why}; "
        "committed shards are kept, run the same command again to go on"
    )


def run_process(job: EncodeJob, threads: int, pipe: Connection) -> None:
    """Run a worker until it is told to stop, or its parent is gone: a rerun must not find a second writer."""
    ignore_stop_signals()
    inbox, sending = Inbox(), threading.Lock()

    def listen() -> None:
        with ending_with_parent():
            while (shard := pipe.recv()) != STOP:
                inbox.put(shard)
            inbox.drop()
            pipe.recv()  # raises once the parent has ended

    def send(event: Event | EncodeOnceError | OSError) -> None:
        with ending_with_parent(), sending:
            pipe.send(event)

    threading.Thread(target=listen, daemon=True).start()
    try:
        start_worker(job, threads, inbox, send, lambda: send(None))
    except Interrupted:
        pass  # nothing to report: we were told to stop
    except (EncodeOnceError, OSError) as error:
        send(error)


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """End this process if its parent has closed the pipe."""
    try:
        yield
    except (EOFError, OSError):
        os._exit(1)


def encoder_of_worker(config: EncoderConfig, index: int) -> EncoderConfig:
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(config, device=f"cuda:{index % torch.cuda.device_count()}")
    return config
