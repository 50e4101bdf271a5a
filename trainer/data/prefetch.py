"""Loading ahead: background threads make the next batches while the model works on this one.

One thread is enough where latents are copied out of memory maps, several orders of magnitude faster than a language
model reads them; out of an object store each batch waits for its slowest answer. An error is raised where its batch is
taken.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 2
"""Items for each thread."""

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


def prefetched(load: Callable[[KeyT], ItemT], keys: Iterable[KeyT], threads: int = 1) -> Generator[ItemT]:
    """Yield `load(key)` for each key in order; up to two a thread are made before they are needed."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    pending: deque[Future[ItemT]] = deque()
    finalizing = sys.is_finalizing  # a local name: modules lose theirs before the last generators are closed
    try:
        for key in keys:
            pending.append(pool.submit(load, key))
            if len(pending) > AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        if not finalizing():  # the interpreter's end has joined the thread already; nobody waits for a silent store
            pool.shutdown(wait=False, cancel_futures=True)
