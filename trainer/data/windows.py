"""Samples of a shuffle in blocks: a window's are read as one, before they are needed, and held while they are shown."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trainer.data.order import Int64Array, SampleOrder

# Axes: N samples asked for.

Samples = Mapping[str, np.ndarray]
"""By the tower's name, [N, *shape] each."""

AHEAD = 2
"""Windows that are read while one is shown: one waits for answers while samples of the other are checked and copied."""

MOST_WINDOWS = AHEAD + 2
"""The one at hand, those ahead, and one before, of which another thread may still be making a batch."""


@dataclass
class Window:
    """One rank's part of a window."""

    positions: Int64Array
    """Rising."""
    samples: Future[Samples]
    left: int
    """Samples that have not been shown yet."""


class WindowReader:
    """One rank's samples by position, where positions rise slowly; any thread may ask.

    It holds this rank's part of a window until all of it was shown, and those of the next ones, which are being read.
    """

    def __init__(
        self,
        order: SampleOrder,
        mine: Callable[[Int64Array], Int64Array],
        read: Callable[[Int64Array], Samples],
        end: int,
    ) -> None:
        """`mine` gives those of some positions that this rank shows, `read` the samples at positions before `end`."""
        self._order, self._mine, self._read, self._end = order, mine, read, end
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="window")
        self._lock = threading.Lock()
        self._windows: dict[int, Window] = {}

    def __call__(self, positions_N: Int64Array) -> Samples:
        shown: dict[str, np.ndarray] = {}
        for first, end, here in self._bounds(positions_N):
            window = self._window(first, end)
            rows = np.searchsorted(window.positions, positions_N[here])
            for name, each in window.samples.result().items():
                if len(here) == len(positions_N):
                    shown[name] = each[rows]
                    continue
                if name not in shown:
                    shown[name] = np.empty((len(positions_N), *each.shape[1:]), each.dtype)
                shown[name][here] = each[rows]
            self._let_go(first, window, len(here))
        return shown

    def close(self) -> None:
        """Without waiting for what is being read: a store may not answer, and Ctrl-C comes this way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bounds(self, positions_N: Int64Array) -> Iterator[tuple[int, int, np.ndarray]]:
        """Each window's first position, the one behind its last, and where those asked for of it stand."""
        position, last = int(positions_N.min()), int(positions_N.max())
        while position <= last:
            first, end = self._order.window(position)
            yield first, end, np.flatnonzero((positions_N >= first) & (positions_N < end))
            position = end

    def _window(self, first: int, end: int) -> Window:
        """The window, while reading of the next ones begins."""
        with self._lock:
            window = self._begin(first, end)
            for _ in range(AHEAD):
                first, end = self._order.window(end)
                if first < self._end:
                    self._begin(first, end)
            return window

    def _begin(self, first: int, end: int) -> Window:
        if first not in self._windows:
            positions = self._mine(np.arange(first, min(end, self._end)))
            self._windows[first] = Window(positions, self._pool.submit(self._read, positions), len(positions))
        return self._windows[first]

    def _let_go(self, first: int, window: Window, shown: int) -> None:
        """Of the window, when all is shown; and of the oldest, of which a resumed run shows only a part."""
        with self._lock:
            window.left -= shown
            if window.left == 0:
                self._windows.pop(first, None)
            for oldest in sorted(self._windows)[:-MOST_WINDOWS]:
                del self._windows[oldest]
