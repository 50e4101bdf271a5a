"""Copy rows scattered over mapped files into one buffer: the inner loop of reading uncompressed samples.

Every copy function has the signature `(out, addresses, row_bytes)`: it fills row i of `out` [N, row_bytes],
C-contiguous, from addresses[i], which it trusts. The C functions exist if there was a compiler when the package was
installed. Which one is fastest depends on the processor (prefetching takes 0.8 of memcpy's time on one, twice its time
on another) and on the batch, so they are timed on real batches and the fastest is kept.

Rows that are not in memory are another matter: then the whole batch is requested from the disk before it is copied,
which is several times as fast.
"""

import ctypes
import mmap
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

__all__ = ["COPY_FUNCTIONS", "Fastest", "ReadAhead", "move_rows", "read_ahead"]

Copy = Callable[[NDArray[Any], NDArray[Any], int], None]

TRIALS = 8
"""Batches on which each function is timed; medians decide, since two threads are sometimes fast on a busy machine."""

SETTLED = 128
"""The functions are timed a second and last time after this many batches: by then most pages are mapped."""

COLD_PART = 64
"""A batch is read ahead after one in which more than one row in this many had to wait for the disk."""

AHEAD = 8, 1_024
"""Batches that are read ahead before one is read without, to find out whether the rows are in memory by now: the first
value, then twice as many each time, up to the second.
"""

PIECE_BYTES = 128 << 10
"""Bytes per request: the system reads at most the device's read-ahead at a time, which is this or more."""

MADVISE = ctypes.CDLL(None).madvise
MADVISE.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def move_rows(out: NDArray[Any], addresses: NDArray[Any], row_bytes: int, /) -> None:
    """Copy with one memmove per row, without the C extension; a read then takes 1.3 to 1.6 times as long."""
    target = out.ctypes.data
    for row, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + row * row_bytes, address, row_bytes)


def compiled_functions() -> list[Copy]:
    """List the C functions, with and without prefetching, for one thread and two; ImportError without the extension."""
    from cache_store.cache._gather import gather

    def function(prefetch: bool, threads: int) -> Copy:
        return lambda out, addresses, row_bytes: gather(out, addresses, row_bytes, prefetch, threads)

    return [function(prefetch, threads) for threads in (1, 2) for prefetch in (False, True)]


try:
    COPY_FUNCTIONS = compiled_functions()
except ImportError:  # not built, or built for another machine
    COPY_FUNCTIONS = [move_rows]


class Fastest:
    """Chooses the copy function that was fastest when all were timed in turn on similar batches.

    Threads may share it: a race only adds a trial or loses one.
    """

    def __init__(self, functions: Sequence[Copy], clock: Callable[[], float] = time.perf_counter) -> None:
        self._functions, self._clock = functions, clock
        self._kinds: dict[tuple[int, bool], Trials] = {}

    @contextmanager
    def choose(self, batch_bytes: int, is_checked: bool, is_in_memory: bool = True) -> Iterator[Copy]:
        """Choose a function for a batch, and time the block while the functions are tried and the rows are in memory.

        The block includes the check of checksums: rows that another core has copied take longer to read.
        """
        kind = batch_bytes.bit_length(), is_checked  # batches between two powers of two count as one size
        trials = self._kinds.get(kind) or self._kinds.setdefault(kind, Trials(len(self._functions)))
        number, is_trial = trials.next() if is_in_memory else (trials.fastest, False)
        began = self._clock()
        yield self._functions[number]
        if is_trial:
            trials.record(number, (self._clock() - began) / max(1, batch_bytes))


class Trials:
    """Times of each copy function on batches of one kind."""

    def __init__(self, functions: int) -> None:
        self.fastest = 0
        self._batches = 0
        self._seconds: list[list[float]] = [[] for _ in range(functions)]
        """Seconds per byte of each function's trials."""

    def next(self) -> tuple[int, bool]:
        """Return the index of the function for the next batch, and whether that is a trial."""
        self._batches += 1
        if self._batches == SETTLED:
            self._seconds = [[] for _ in self._seconds]
        least = min(self._seconds, key=len)
        is_trial = len(self._seconds) > 1 and len(least) < TRIALS
        return (self._seconds.index(least) if is_trial else self.fastest), is_trial

    def record(self, number: int, seconds_per_byte: float) -> None:
        self._seconds[number].append(seconds_per_byte)
        if all(len(each) >= TRIALS for each in self._seconds):
            medians = [statistics.median(each) for each in self._seconds]
            self.fastest = medians.index(min(medians))


def disk_waits() -> int:
    """Return how often this thread (on a Mac: this process) has waited for a page of a mapped file."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_majflt


def read_ahead(addresses: NDArray[Any], lengths: NDArray[Any] | int) -> None:
    """Ask the system to read the pages of rows [N] in mapped files that are not in memory, without waiting for them.

    Without this, each row is waited for before the next is requested, and the system also reads the pages around it:
    128 KiB on most devices, 8 MiB on some. The request is only advice, so errors are ignored.
    """
    first = addresses - addresses % mmap.PAGESIZE
    for start, end in zip(first.tolist(), (addresses + lengths).tolist(), strict=True):
        for piece in range(start, end, PIECE_BYTES):
            MADVISE(piece, min(PIECE_BYTES, end - piece), mmap.MADV_WILLNEED)


class ReadAhead:
    """Requests batches from the disk while rows are not in memory; threads may share it."""

    def __init__(
        self,
        count_waits: Callable[[], int] = disk_waits,
        request: Callable[[NDArray[Any], NDArray[Any] | int], None] = read_ahead,
    ) -> None:
        self._count_waits, self._request = count_waits, request
        self._left, self._next = AHEAD[0], 2 * AHEAD[0]
        """Batches to read ahead before one is read without, and how many follow if that one waits for the disk."""
        self._is_cold = True

    @contextmanager
    def batch(self, addresses: NDArray[Any], lengths: NDArray[Any] | int) -> Iterator[bool]:
        """Read rows [N] ahead, or count how many of them wait for the disk; yield whether they seem to be in memory."""
        if self._left > 0:
            self._left -= 1
            self._request(addresses, lengths)
            yield False
            return
        before = self._count_waits()
        yield not self._is_cold
        self._is_cold = (self._count_waits() - before) * COLD_PART > len(addresses)
        if self._is_cold:
            self._left, self._next = self._next, min(2 * self._next, AHEAD[1])
        else:
            self._next = AHEAD[0]
