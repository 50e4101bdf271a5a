"""Prefetching: background threads read what training needs next, while the model works on the current batch.

`prefetched` makes whole batches ahead. One thread is enough for memory-mapped latents; from an object store, each batch
waits for its slowest answer, so several help. `WindowReader` reads ahead for a shuffle in blocks: it reads a window's
samples together, and holds them while they are shown.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import TypeVar

import numpy as np

from trainer.data.buckets import Places, SampleOrder
from trainer.data.order import Int64Array, RankShare

ITEMS_PER_THREAD = 2
"""Items made ahead by each thread."""

JUDGED, MOST_WAITING = 20, 0.05
"""Another thread helps if taking so many items took more than this share of the time."""

WINDOWS_AHEAD = 2
"""Windows read ahead of the current one: one can wait for answers while the other's samples are checked and copied."""

MOST_WINDOWS = WINDOWS_AHEAD + 2
"""Most windows of a bucket that are held: another thread may still read from the one before the current."""

# Axes: N samples to show.

Samples = Mapping[str, np.ndarray]
"""Each tower's samples [N, *shape], by its name."""

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


def prefetched(
    load: Callable[[KeyT], ItemT], keys: Iterable[KeyT], threads: int = 1, most: int = 0
) -> Generator[ItemT]:
    """Yield `load(key)` for each key in order, or raise its error; each thread makes up to two items ahead.

    While taking items waits for too long, more threads help, up to `most`.
    """
    pool = ThreadPoolExecutor(max(threads, most), thread_name_prefix="prefetch")
    at_once = Semaphore(threads)
    taken, waited, since = 0, 0.0, time.perf_counter()

    def loaded(key: KeyT) -> ItemT:
        with at_once:
            return load(key)

    pending: deque[Future[ItemT]] = deque()
    finalizing = sys.is_finalizing  # bound locally: at exit, a module may lose its names before generators are closed
    try:
        for key in keys:
            pending.append(pool.submit(loaded, key))
            if len(pending) > ITEMS_PER_THREAD * threads:
                began = time.perf_counter()
                item = pending.popleft().result()
                now = time.perf_counter()
                taken, waited = taken + 1, waited + now - began
                if taken == JUDGED:
                    if threads < most and waited > MOST_WAITING * (now - since):
                        threads += 1
                        at_once.release()
                    taken, waited, since = 0, 0.0, now
                yield item
        while pending:
            yield pending.popleft().result()
    finally:
        if not finalizing():  # at exit the threads have been joined already; else do not wait, a store may not answer
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Window:
    """One rank's part of a window."""

    own: Int64Array
    """Positions in the bucket that this rank shows, ascending."""
    samples: Future[Samples]
    left: int
    """Number of samples not shown yet."""


class WindowReader:
    """Reads one rank's part of a batch at a time; any thread may call, with batches that rise slowly.

    It holds this rank's part of a bucket's window until all was shown, and reads the bucket's next windows ahead.
    """

    def __init__(self, order: SampleOrder, share: RankShare, read: Callable[[Places], Samples], end: int) -> None:
        """`read` is never asked for places of batches from the position `end` on."""
        self._order, self._share, self._read, self._end = order, share, read, end
        self._pool = ThreadPoolExecutor(WINDOWS_AHEAD, thread_name_prefix="window")
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int], Window] = {}
        """By bucket and first position there."""

    def __call__(self, positions_N: Int64Array) -> Samples:
        shown: dict[str, np.ndarray] = {}
        places = self._order.places(positions_N)
        bucket, own_N = int(places.bucket_N[0]), places.own_N
        for first, end, here in self._bounds(bucket, own_N):
            window = self._window(bucket, first, end)
            rows = np.searchsorted(window.own, own_N[here])
            for name, each in window.samples.result().items():
                if len(here) == len(positions_N):
                    shown[name] = each[rows]
                    continue
                if name not in shown:
                    shown[name] = np.empty((len(positions_N), *each.shape[1:]), each.dtype)
                shown[name][here] = each[rows]
            self._release((bucket, first), window, len(here))
        return shown

    def close(self) -> None:
        """Stop without waiting for reads in progress: after Ctrl-C, the store may not answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bounds(self, bucket: int, own_N: Int64Array) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield each window's range of positions [first, end), and the indices of `own_N` within it."""
        position, last, order = int(own_N.min()), int(own_N.max()), self._order.permutation(bucket)
        while position <= last:
            first, end = order.window(position)
            yield first, end, np.flatnonzero((own_N >= first) & (own_N < end))
            position = end

    def _window(self, bucket: int, first: int, end: int) -> Window:
        order, last = self._order.permutation(bucket), self._order.end(bucket, self._end)
        with self._lock:
            window = self._begin(bucket, first, min(end, last))
            for _ in range(WINDOWS_AHEAD):
                first, end = order.window(end)
                if first < last:
                    self._begin(bucket, first, min(end, last))
            return window

    def _begin(self, bucket: int, first: int, end: int) -> Window:
        if (bucket, first) not in self._windows:
            own = self._share.select(np.arange(first, end))
            samples = self._pool.submit(self._read, Places(np.full_like(own, bucket), own))
            self._windows[bucket, first] = Window(own, samples, len(own))
        return self._windows[bucket, first]

    def _release(self, place: tuple[int, int], window: Window, shown: int) -> None:
        """Drop the window once all was shown, and old ones of which a resumed run shows only a part."""
        with self._lock:
            window.left -= shown
            if window.left == 0:
                self._windows.pop(place, None)
            for oldest in sorted(each for each in self._windows if each[0] == place[0])[:-MOST_WINDOWS]:
                del self._windows[oldest]
