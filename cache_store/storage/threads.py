"""Make many calls to a store at the same time, each in a thread, so that the one that waits still reacts to signals."""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

POLL_S = 0.2
"""Seconds between two looks for a stop."""

IN_FLIGHT = 128
"""Most calls of one process at the same time: each waits about 20 ms for its first byte."""

THREAD = "store"
"""Prefix of the names of the threads that make calls."""

T = TypeVar("T")
R = TypeVar("R")

STOP_REQUEST = threading.Event()
"""The event that ends this process; set by a signal, by the parent of a worker, or at the end of a program.

The main thread never waits for it: the handler of a signal, which runs there, could then not set it.
"""


@lru_cache(maxsize=1)
def make_pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(IN_FLIGHT, THREAD)


def is_one() -> bool:
    # Calls of such a thread would wait for each other, so it makes them itself.
    return threading.current_thread().name.startswith(THREAD)


def submit(call: Callable[..., T], *values: Any) -> Future[T]:
    """Make the call in one of this process's threads, or at once if this is one."""
    if not is_one():
        return make_pool(os.getpid()).submit(call, *values)
    done = Future[T]()
    complete(done, lambda: call(*values))
    return done


def complete(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 (`result` raises it)
        future.set_exception(error)


def start_thread(call: Callable[[], object]) -> None:
    threading.Thread(target=call, daemon=True).start()


def map_concurrently(call: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
    """Call `call` for many items at the same time and return the results in order; nested uses run one by one.

    After an error, no call begins that has not.
    """
    each = [*items]
    if len(each) < 2 or is_one():
        return [*map(call, each)]
    return [*make_pool(os.getpid()).map(call, each)]
