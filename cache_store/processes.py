"""Work spread over processes.

Processes rather than threads: a sample is checked in a dozen calls of a few microseconds each, and threads that take
turns at the interpreter between such calls gain nothing. Spawned ones, because a fork of a program with threads may
hang; without torch they start in half a second.
"""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

from cache_store.errors import EncodeOnceError

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

CHUNKS_A_JOB = 1_000
"""Tasks travel one at a time up to this many a process, and in chunks of equal size beyond."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_work: list[Callable[[Any], Any]] = []
"""In a worker process: what it does with a task."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(
    make_work: Callable[[], Callable[[TaskT], ResultT]], tasks: Sequence[TaskT], jobs: int
) -> Iterator[tuple[int, ResultT]]:
    """`make_work()(task)` of every task as they get done, each with its task's position; a process makes its work once.

    One job works in this process. An exception here or in a worker ends them all; tasks in hand are finished first.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from enumerate(map(make_work(), tasks))
        return
    context = multiprocessing.get_context("spawn")
    size = -(-len(tasks) // (jobs * CHUNKS_A_JOB))
    with ProcessPoolExecutor(jobs, context, start_work, (make_work,)) as pool:
        try:
            with stop_signals_held():  # processes start as work is handed in
                starts = range(0, len(tasks), size)
                chunks = {pool.submit(do_work, tasks[start : start + size]): start for start in starts}
            for done in as_completed(chunks):
                yield from enumerate(done.result(), start=chunks[done])
        except BrokenProcessPool:
            raise EncodeOnceError(
                "a worker process died, killed often for want of memory; run the same command again with fewer jobs"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def start_work(make_work: Callable[[], Callable[[Any], Any]]) -> None:
    """A worker process's beginning."""
    obey_parent_alone()
    _work.append(make_work())
    gc.freeze()  # what is loaded stays, and the collector need not look through it again


def do_work(tasks: Sequence[Any]) -> list[Any]:
    return [_work[0](task) for task in tasks]


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block ends, and a process started in it stays deaf until `obey_parent_alone`.

    They go to the whole group, and would end a process that is still importing as no worker is to end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_alone() -> None:
    """End with the parent and when it says so, whatever the group is sent; for processes of `stop_signals_held`."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent() -> None:
    """A killed parent cannot tell us to stop, and a rerun of a build must not meet two writers in one shard."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
