"""Threads that make calls which may never be answered, and that nobody has to wait for.

A call into a library for the network is deaf to signals, and the threads of Python's own executors are waited for when
a program ends. So calls are made in daemon threads, and whoever waits for one looks up now and then.
"""

import concurrent.futures.thread  # noqa: F401 (its own hook at exit has to be there before ours)
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from cache_store.errors import Interrupted

GRACE_S, UPLOAD_GRACE_S = 1.0, 10.0
"""For a call to be answered, once its program was asked to stop: what is uploaded may be an hour of work."""

POLL_S = 0.2

GIVEN_UP = "the object store had not answered yet; run the same command again"

P = ParamSpec("P")
T = TypeVar("T")

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
    """One that is waited for, after a stop, for no longer than its grace."""

    def __init__(self, call: Callable[[], T], grace_s: float = GRACE_S) -> None:
        super().__init__()
        self._call, self._grace_s = call, grace_s

    def make(self) -> None:
        """Unless nobody waits any longer; nor does an answer that comes later go anywhere."""
        if self.done():
            return
        with suppress(InvalidStateError):
            try:
                self.set_result(self._call())
            except BaseException as error:  # noqa: BLE001 (it is raised where the call is waited for)
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """Whatever the `timeout`."""
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
    """So many threads at most, started as they are needed."""

    def __init__(self, most: int) -> None:
        self._most, self._threads, self._starting = most, set[threading.Thread](), threading.Lock()
        self._asked, self._idle = SimpleQueue[Call[Any]](), threading.Semaphore(0)

    def submit(self, call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        return self._ask(Call(lambda: call(*args, **named)))

    def run(self, call: Callable[[], T], grace_s: float = GRACE_S) -> T:
        """What the call gives; a thread that is one of ours makes it itself."""
        return call() if threading.current_thread() in self._threads else self._ask(Call(call, grace_s)).result()

    def _ask(self, call: Call[T]) -> Call[T]:
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
