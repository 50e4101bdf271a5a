"""A file that is read by ranges, as one that is open: small ones here and there, larger ones where it is in order."""

import io
import os
from collections.abc import Callable
from typing import Any

SMALLEST_BYTES, LARGEST_BYTES = 256 << 10, 16 << 20
"""Of a range: at first and after a jump; after as many doublings as it takes, where the file is read in order."""


class RangeReader(io.RawIOBase):
    """Bytes of a file of known size, through `fetch(start, length)`."""

    def __init__(self, size: int, fetch: Callable[[int, int], memoryview]) -> None:
        self._size, self._fetch = size, fetch
        self._position = self._start = 0
        self._held = memoryview(b"")
        self._window = SMALLEST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        if self._position >= self._size or not len(target):
            return 0
        if not self._start <= self._position < self._start + len(self._held):
            self._fill(len(target))
        first = self._position - self._start
        part = self._held[first : first + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _fill(self, wanted: int) -> None:
        is_next = self._position == self._start + len(self._held)
        self._window = min(2 * self._window, LARGEST_BYTES) if is_next else SMALLEST_BYTES
        length = min(max(wanted, self._window), self._size - self._position)
        self._start, self._held = self._position, self._fetch(self._position, length)
