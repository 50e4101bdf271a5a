"""Rows that lie scattered in mapped files, copied into one buffer: the inner loop of reading uncompressed samples.

Every way to copy has the signature `(out, addresses, row_bytes)`: row i of `out` [N, row_bytes], C-contiguous, becomes
the bytes at addresses[i], which are trusted. The C ways are there where the machine that installed the package had a
compiler. Which of them is fast depends on the processor (prefetching takes 0.8 of memcpy's time on one, twice its time
on another) and on the batch, so they are timed on real batches and the fastest is kept.

One more has the disk read the whole batch before it copies: several times as fast where the rows are not in memory
(`benchmarks/cold.py`), slower where they are.
"""

import ctypes
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from cache_store.cores import usable_cores

__all__ = ["COPIES", "READ_AHEAD_OR_NOT", "WAYS", "Fastest", "move_rows", "read_ahead", "reading_ahead"]

Copy = Callable[[NDArray[Any], NDArray[Any], int], None]

Way = TypeVar("Way")

TRIALS = 8
"""Batches given to each way before the fastest is kept."""

ROUNDS = 128, 2_048
"""Batches until the choice is made again, at first and at most, four times as many each time: early batches page their
files in, and later other work may come to the machine.
"""

HOPELESS = 4
"""Times the fastest one's: a way both of whose first trials took longer is not tried again in this round. Rows that are
not in memory make all ways that slow but the one that reads ahead.
"""

SLOW_BATCHES = 8
"""One after the other that took `HOPELESS` times what was typical: something has changed, and all ways are tried again.
"""

PIECE_BYTES = 128 << 10
"""Of a row: the system reads ahead no more at a time than the device does, which is this or more."""

MADVISE = ctypes.CDLL(None).madvise
MADVISE.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def move_rows(out: NDArray[Any], addresses: NDArray[Any], row_bytes: int, /) -> None:
    """One memmove a row: as right as in C; a read takes 1.3 to 1.6 times as long."""
    target = out.ctypes.data
    for row, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + row * row_bytes, address, row_bytes)


def read_ahead(addresses: NDArray[Any], lengths: NDArray[Any] | int) -> None:
    """Have the system read what is not in memory of rows [N] in mapped files: these pages alone, without waiting.

    A row that is only touched is waited for before the next is asked for, and the system reads around it as much as it
    reads ahead on that device: 128 KiB on most, 8 MiB on some. All of that is advice, so errors do not matter.
    """
    first = addresses - addresses % mmap.PAGESIZE
    for start, end in zip(first.tolist(), (addresses + lengths).tolist(), strict=True):
        for piece in range(start, end, PIECE_BYTES):
            MADVISE(piece, min(PIECE_BYTES, end - piece), mmap.MADV_WILLNEED)


def no_read_ahead(addresses: NDArray[Any], lengths: NDArray[Any] | int) -> None:
    """What is touched is read as it is touched."""


def reading_ahead(copy: Copy) -> Copy:
    def read_and_copy(out: NDArray[Any], addresses: NDArray[Any], row_bytes: int) -> None:
        read_ahead(addresses, row_bytes)
        copy(out, addresses, row_bytes)

    return read_and_copy


class Fastest(Generic[Way]):
    """Gives each batch a way: the one that was the fastest when all were tried, turn about, on batches like it.

    Threads may share one: whichever of them chooses, it is one of the ways.
    """

    def __init__(self, ways: Sequence[Way], clock: Callable[[], float] = time.perf_counter) -> None:
        self._ways, self._clock = ways, clock
        self._choices: dict[tuple[int, bool], Choice] = {}

    @contextmanager
    def way(self, batch_bytes: int, is_checked: bool) -> Iterator[Way]:
        """The way for a batch; what is done in the block is what is timed.

        A check belongs to it: rows that another core has copied take longer to read.
        """
        kind = batch_bytes.bit_length(), is_checked  # of one size: from a power of two up to the next
        choice = self._choices.get(kind) or self._choices.setdefault(kind, Choice(len(self._ways)))
        number, is_trial = choice.next()
        began = self._clock()
        yield self._ways[number]
        choice.tell(number, (self._clock() - began) / max(1, batch_bytes), is_trial)


class Choice:
    """Which of several ways takes the least time a byte. Threads that share one may change it at any line."""

    def __init__(self, ways: int) -> None:
        self._ways = ways
        self._batches, self._round = 0, ROUNDS[0]
        """Batches of this round so far, and of the whole of it."""
        self._seconds: list[list[float]] = [[] for _ in range(ways)]
        """A byte, of each way's trials in this round."""
        self._typical = [math.inf] * ways
        """Medians, of this round's trials or of the last's."""
        self._slow = 0
        """Batches just now that took much longer than is typical."""

    def next(self) -> tuple[int, bool]:
        """The way for the next batch, and whether it is a trial of that way."""
        if self._batches >= self._round:
            self._batches, self._round = 0, min(4 * self._round, ROUNDS[1])
            self._seconds = [[] for _ in range(self._ways)]
        place, self._batches = self._batches, self._batches + 1
        way, typical = place % self._ways, [*self._typical]
        tried, fastest = self._seconds[way], min(typical)
        is_hopeless = len(tried) > 1 and min(tried) > HOPELESS * fastest
        is_trial = self._ways > 1 and place < TRIALS * self._ways and not is_hopeless
        return (way if is_trial else typical.index(fastest)), is_trial

    def tell(self, way: int, seconds_a_byte: float, is_trial: bool) -> None:
        """By the median: a second thread has its good moments on a machine that is busy otherwise."""
        if is_trial:
            tried = self._seconds[way]
            tried.append(seconds_a_byte)
            self._typical[way] = statistics.median(tried)
            return
        self._slow = self._slow + 1 if seconds_a_byte > HOPELESS * self._typical[way] else 0
        if self._slow == SLOW_BATCHES:
            self._slow, self._batches = 0, self._round


def compiled_ways() -> list[Copy]:
    """One thread and, where there is a second core, two; ImportError where the extension is not there."""
    from cache_store.cache._gather import gather

    def way(prefetch: bool, threads: int) -> Copy:
        return lambda out, addresses, row_bytes: gather(out, addresses, row_bytes, prefetch, threads)

    return [way(prefetch, threads) for threads in range(1, min(2, usable_cores()) + 1) for prefetch in (False, True)]


try:
    WAYS = compiled_ways()
except ImportError:  # not built, or built for another machine
    WAYS = [move_rows]

COPIES = [*WAYS, reading_ahead(WAYS[0])]
READ_AHEAD_OR_NOT = [no_read_ahead, read_ahead]
"""Of rows that are decoded, not copied."""
