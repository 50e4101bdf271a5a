"""Copy rows scattered over mapped files into one buffer: the inner loop of reading uncompressed samples.

If rows are not in memory, the whole batch is first requested from the disk, which is several times as fast.
"""

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

__all__ = ["ReadAhead", "copy_rows", "move_rows", "read_ahead"]

COLD_PART = 64
"""Batches are read ahead after one in which more than one row in this many had to wait for the disk."""

FIRST_AHEAD, AHEAD = 8, 512
"""Number of batches read ahead at first, and after one that waited for the disk. The batch after these is not read
ahead, which shows whether rows are in memory by now.
"""

PIECE_BYTES = 128 << 10
"""Bytes per request: the system reads at most the device's read-ahead at a time, which is this or more."""

MADVISE = ctypes.CDLL(None).madvise
MADVISE.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def move_rows(out: NDArray[Any], addresses: NDArray[Any], row_bytes: int, /) -> None:
    """Fill row i of `out` [N, row_bytes], C-contiguous, from addresses[i], which it trusts."""
    target = out.ctypes.data
    for row, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + row * row_bytes, address, row_bytes)


try:
    from cache_store.cache._gather import gather as copy_rows
except ImportError:  # no compiler at installation, or built for another machine: a read takes 1.3 to 1.6 times as long
    copy_rows = move_rows


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
        self._count_waits, self._request, self._left = count_waits, request, FIRST_AHEAD

    @contextmanager
    def batch(self, addresses: NDArray[Any], lengths: NDArray[Any] | int) -> Iterator[None]:
        """Read rows [N] ahead, or count how many of them wait for the disk in this block."""
        if self._left > 0:
            self._left -= 1
            self._request(addresses, lengths)
            yield
            return
        before = self._count_waits()
        yield
        if (self._count_waits() - before) * COLD_PART > len(addresses):
            self._left = AHEAD
