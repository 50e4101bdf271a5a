"""Threads that make calls which may never be answered, and that nobody has to wait for.

A call into a library for the network is deaf to signals, and the threads of Python's own executors are waited for when
a program ends. So calls are made in daemon threads, and whoever waits for one of them can be released.
"""

import threading
import time
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


@contextmanager
def giving_up(stop: Callable[[], bool]) -> Iterator[None]:
    """Around work that ends once `stop` says so: who waits for a call for longer than its grace gets Interrupted."""
    STOPS.append(stop)
    try:
        yield
    finally:
        STOPS.remove(stop)


class Thread(threading.local):
    calls = False
    """Whether it is one of those that make calls."""


THIS = Thread()


class Callers(Executor):
    """So many threads at most, started as they are needed."""

    def __init__(self, most: int) -> None:
        self._most, self._started, self._starting = most, 0, threading.Lock()
        self._asked = SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        self._idle = threading.Semaphore(0)
        self._under_way = dict[Future[Any], tuple[float, float]]()
        """When each call was asked for, and its grace."""
        threading.Thread(target=self._watch, daemon=True).start()
        # The program ends, and joins threads that wait for calls: a public hook comes after that.
        threading._register_atexit(self.give_up)  # type: ignore[attr-defined]

    def submit(self, call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        return self.make(lambda: call(*args, **named))

    def run(self, call: Callable[[], T], grace_s: float = GRACE_S) -> T:
        """What the call gives; a thread that is one of ours makes it itself."""
        return call() if THIS.calls else self.make(call, grace_s).result()

    def make(self, call: Callable[[], T], grace_s: float = GRACE_S) -> Future[T]:
        future = Future[T]()
        self._under_way[future] = time.monotonic(), grace_s
        future.add_done_callback(self._under_way.pop)
        self._asked.put((future, call))
        if self._started < self._most and not self._idle.acquire(blocking=False):
            with self._starting:
                if self._started < self._most:
                    self._started += 1
                    threading.Thread(target=self._work, name="fetch", daemon=True).start()
        return future

    def give_up(self, stopped_at: float | None = None) -> None:
        """Release who waits for a call, or who has for its grace since then; answers that come later go nowhere."""
        for future, (asked_at, grace_s) in [*self._under_way.items()]:
            if stopped_at is None or time.monotonic() > max(stopped_at, asked_at) + grace_s:
                with suppress(InvalidStateError):
                    future.set_exception(Interrupted(GIVEN_UP))

    def _work(self) -> None:
        THIS.calls = True
        while True:
            if self._started < self._most and self._asked.empty():
                self._idle.release()
            settle(*self._asked.get())

    def _watch(self) -> None:
        stopped_at: float | None = None
        while True:
            time.sleep(POLL_S)
            if not any(stop() for stop in [*STOPS]):
                stopped_at = None
            elif stopped_at is None:
                stopped_at = time.monotonic()
            else:
                self.give_up(stopped_at)


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Unless nobody waits any longer."""
    if future.done():
        return
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 (it is raised where the call is waited for)
        with suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(answer)
