"""Threads that make calls which may never be answered, and that nobody has to wait for.

A call into a network library does not react to signals, and Python waits for the threads of its own executors when a
program ends. So calls run in daemon threads, and a waiting thread checks for a stop at intervals.
"""

import concurrent.futures.thread  # noqa: F401 (its own hook at exit has to be there before ours)
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from cache_store.errors import Interrupted

GRACE_S, UPLOAD_GRACE_S = 1.0, 10.0
"""For a call to be answered, once its program was asked to stop: what is uploaded may be an hour of work."""

POLL_S = 0.2

IN_FLIGHT = 128
"""Calls of one process at the same time: each waits some 20 ms for its first byte."""

GIVEN_UP = "the object store had not answered yet; run the same command again"

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

STOPS: list[Callable[[], bool]] = []
"""Each says whether work that is going on was asked to stop."""

# A program that ends joins threads that may wait for calls: a public hook comes after that.
threading._register_atexit(STOPS.append, lambda: True)  # type: ignore[attr-defined]


@contextmanager
def giving_up(stop: Callable[[], bool]) -> Iterator[None]:
    """Around work that ends once `stop` says so: who waits for a call for longer than its grace gets Interrupted."""
    STOPS.append(stop)
    try:
        yield
    finally:
        STOPS.remove(stop)


class Call(Future[T]):
    """A call that is waited for, after a stop, for no longer than its grace."""

    def __init__(self, call: Callable[[], T], grace_s: float = GRACE_S) -> None:
        super().__init__()
        self._call, self._grace_s = call, grace_s

    def make(self) -> None:
        """Make the call unless it was given up; drop an answer that comes too late."""
        if self.done():
            return
        with suppress(InvalidStateError):
            try:
                self.set_result(self._call())
            except BaseException as error:  # noqa: BLE001 (it is raised where the call is waited for)
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer, whatever the `timeout`; Interrupted once the grace behind a stop has passed."""
        left_s = self._grace_s
        while not self.done():
            with suppress(TimeoutError):
                self.exception(POLL_S)
            if any(stop() for stop in [*STOPS]):
                left_s -= POLL_S
            if left_s <= 0:
                with suppress(InvalidStateError):
                    self.set_exception(Interrupted(GIVEN_UP))
        return super().result()


class Callers(Executor):
    """An executor of at most `most` daemon threads, started when needed."""

    def __init__(self, most: int) -> None:
        self._most, self._threads, self._starting = most, set[threading.Thread](), threading.Lock()
        self._asked, self._idle = SimpleQueue[Call[Any]](), threading.Semaphore(0)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is one of these, which would wait for each other."""
        return threading.current_thread() in self._threads

    def submit(self, call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Call[T]:
        return self.ask(Call(lambda: call(*args, **named)))

    def run(self, call: Callable[[], T], grace_s: float = GRACE_S) -> T:
        """Return what the call gives."""
        return call() if self.is_here else self.ask(Call(call, grace_s)).result()

    def ask(self, call: Call[T]) -> Call[T]:
        """Have a call made by one of these threads; if the calling thread is one, it makes it now."""
        if self.is_here:
            call.make()
            return call
        self._asked.put(call)
        with self._starting:
            if len(self._threads) < self._most and not self._idle.acquire(blocking=False):
                thread = threading.Thread(target=self._work, name="fetch", daemon=True)
                self._threads.add(thread)
                thread.start()
        return call

    def _work(self) -> None:
        while True:
            if self._asked.empty():
                self._idle.release()
            self._asked.get().make()


def pool() -> Callers:
    """Return the threads of this process that wait for answers."""
    return make_pool(os.getpid())


@lru_cache(maxsize=1)
def make_pool(process: int) -> Callers:
    return Callers(IN_FLIGHT)


def in_a_thread(call: Call[Any]) -> None:
    """Have a call made by a thread of its own, since it waits for calls of `pool` itself."""
    threading.Thread(target=call.make, daemon=True).start()


def in_flight(call: Callable[[T], R], each: Iterable[T]) -> Sequence[R]:
    """Call for each, many at the same time, and return the results in order; calls within such a call are in turn."""
    items = [*each]
    return [*(map if len(items) < 2 else pool().map)(call, items)]
