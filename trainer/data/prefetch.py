"""Loading ahead: background threads make the next batches while the model works on this one.

One thread is enough where latents are copied out of memory maps, several orders of magnitude faster than a language
model reads them; out of an object store each batch waits for its slowest answer. An error is raised where its batch is
taken.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

AHEAD = 2
"""Items for each thread."""

MOST_WAITING = 0.05
"""Share of the time spent waiting, beyond which another thread helps."""

JUDGED = 20
"""Items after which that is judged, and judged again."""

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


def prefetched(
    load: Callable[[KeyT], ItemT], keys: Iterable[KeyT], threads: int = 1, most: int = 0
) -> Generator[ItemT]:
    """Yield `load(key)` for each key in order; up to two a thread are made before they are needed.

    Where `most` is more than `threads`, one more helps whenever taking items has waited too long, up to so many.
    """
    pool = ThreadPoolExecutor(max(threads, most), thread_name_prefix="prefetch")
    at_once, patience = Semaphore(threads), Patience()

    def loaded(key: KeyT) -> ItemT:
        with at_once:
            return load(key)

    pending: deque[Future[ItemT]] = deque()
    finalizing = sys.is_finalizing  # a local name: modules lose theirs before the last generators are closed
    try:
        for key in keys:
            pending.append(pool.submit(loaded, key))
            if len(pending) > AHEAD * threads:
                yield patience.take(pending.popleft())
                if threads < most and patience.is_over():
                    threads += 1
                    at_once.release()
        while pending:
            yield pending.popleft().result()
    finally:
        if not finalizing():  # the interpreter's end has joined the thread already; nobody waits for a silent store
            pool.shutdown(wait=False, cancel_futures=True)


class Patience:
    """Measures which share of the time is spent waiting for items."""

    def __init__(self) -> None:
        self._taken, self._waited, self._since = 0, 0.0, time.perf_counter()

    def take(self, item: Future[ItemT]) -> ItemT:
        began = time.perf_counter()
        found = item.result()
        self._taken += 1
        self._waited += time.perf_counter() - began
        return found

    def is_over(self) -> bool:
        """Judge after every so many items, and forget them."""
        if self._taken < JUDGED:
            return False
        now = time.perf_counter()
        over = self._waited > MOST_WAITING * (now - self._since)
        self._taken, self._waited, self._since = 0, 0.0, now
        return over
