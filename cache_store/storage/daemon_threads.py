"""Run calls that may never return in threads that nobody has to wait for.

A call into a network library does not react to signals, and Python waits for the threads of its own executors when a
program ends. So calls run in daemon threads, and a waiting thread checks for a stop at intervals.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from cache_store.errors import Interrupted

GRACE_S, UPLOAD_GRACE_S = 1.0, 10.0
"""Seconds that a call may still take after a stop; an upload gets more, since it may be an hour of work."""

POLL_S = 0.2
"""Seconds between two looks for a stop."""

IN_FLIGHT = 128
"""Most calls of one process at the same time: each waits about 20 ms for its first byte."""

GIVEN_UP = "the object store had not answered yet; run the same command again"

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Stop(threading.Event):
    """The event that ends this process; set by a signal, by the parent of a worker, or at the end of a program.

    The main thread never waits for it: the handler of a signal, which runs there, could then not set it.
    """

    patience_s = 0.0
    """Seconds that calls get beyond their grace, while work would be lost without their answers."""


STOP_REQUEST = Stop()


class Call(Future[T]):
    """A call in another thread; once STOP_REQUEST is set, its result is waited for no longer than its grace."""

    def __init__(self, call: Callable[[], T], grace_s: float = GRACE_S) -> None:
        super().__init__()
        self._call, self._grace_s = call, grace_s

    def run(self) -> None:
        """Run the call unless it was cancelled; drop a result that comes too late."""
        if self.done():
            return
        with suppress(InvalidStateError):
            try:
                self.set_result(self._call())
            except BaseException as error:  # noqa: BLE001 (`result` raises it)
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, ignoring `timeout`; Interrupted once STOP_REQUEST was set and the grace is over."""
        left_s = self._grace_s
        while not self.done():
            with suppress(TimeoutError):
                self.exception(POLL_S)
            if STOP_REQUEST.is_set():
                left_s -= POLL_S
            if left_s <= -STOP_REQUEST.patience_s:
                with suppress(InvalidStateError):
                    self.set_exception(Interrupted(GIVEN_UP))
        return super().result()


class DaemonThreads(Executor):
    """An executor of at most `most` daemon threads, started when needed.

    A call that one of these threads makes runs at once in that thread: they would otherwise wait for each other.
    """

    def __init__(self, most: int) -> None:
        self._most, self._threads, self._starting = most, set[threading.Thread](), threading.Lock()
        self._calls, self._idle = SimpleQueue[Call[Any]](), threading.Semaphore(0)

    def submit(self, call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Call[T]:
        return self.start(Call(lambda: call(*args, **named)))

    def wait_for(self, call: Callable[[], T], grace_s: float = GRACE_S) -> T:
        return self.start(Call(call, grace_s)).result()

    def start(self, call: Call[T]) -> Call[T]:
        if threading.current_thread() in self._threads:
            call.run()
            return call
        self._calls.put(call)
        with self._starting:
            if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
                thread = threading.Thread(target=self._work, name="fetch", daemon=True)
                self._threads.add(thread)
                thread.start()
        return call

    def _work(self) -> None:
        while True:
            if self._calls.empty():
                self._idle.release()
            self._calls.get().run()


def pool() -> DaemonThreads:
    """Return the threads of this process that make calls to stores."""
    return make_pool(os.getpid())


@lru_cache(maxsize=1)
def make_pool(process: int) -> DaemonThreads:
    return DaemonThreads(IN_FLIGHT)


def start_thread(call: Call[Any]) -> None:
    """Run the call in a new thread, for a call that waits for threads of `pool`."""
    threading.Thread(target=call.run, daemon=True).start()


def map_concurrently(call: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
    """Call `call` for many items at the same time and return the results in order; nested uses run one by one."""
    each = [*items]
    return [*(map if len(each) < 2 else pool().map)(call, each)]
