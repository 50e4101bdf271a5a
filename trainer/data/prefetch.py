"""Loading ahead: one background thread makes the next batches while the model works on this one.

One thread is enough: latents are copied out of memory maps several orders of magnitude faster than a language model
reads them. An error is raised where its batch is taken.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


def prefetched(load: Callable[[KeyT], ItemT], keys: Iterable[KeyT], ahead: int = 2) -> Generator[ItemT]:
    """Yield `load(key)` for each key in order; up to `ahead` of them are made before they are needed."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    pending: deque[Future[ItemT]] = deque()
    finalizing = sys.is_finalizing  # a local name: modules lose theirs before the last generators are closed
    try:
        for key in keys:
            pending.append(pool.submit(load, key))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        if not finalizing():  # the interpreter's end has joined the thread already
            pool.shutdown(cancel_futures=True)
