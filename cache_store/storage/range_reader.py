"""Reading by ranges: neighbouring parts of a file as one; a file as one that is open, of which a piece is in memory."""

import io
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

COALESCED_BYTES = 64 << 10
"""Ranges that are no further apart are fetched as one."""

SMALLEST_BYTES, LARGEST_BYTES = 256 << 10, 16 << 20
"""Of a range: at first and after a jump; after as many doublings as it takes, where the file is read in order."""

Span = tuple[int, int]
"""The first byte, and the one behind the last."""


def read_parts(parts: Sequence[Span], fetch: Callable[[Sequence[Span]], Iterable[Any]]) -> list[memoryview]:
    """Parts of a file, in any order; neighbours are fetched as one."""
    groups = neighbours(sorted(part for part in parts if part[0] < part[1]))
    spans = [(group[0][0], max(end for _, end in group)) for group in groups]
    found = dict.fromkeys(parts, memoryview(b""))
    for (first, _), group, data in zip(spans, groups, fetch(spans), strict=True):
        view = memoryview(data)
        found |= {(start, end): view[start - first : end - first] for start, end in group}
    return [found[part] for part in parts]


def neighbours(parts: Sequence[Span]) -> list[list[Span]]:
    """Rising parts, those that lie near to each other together."""
    groups: list[list[Span]] = []
    reached = 0
    for part in parts:
        if groups and part[0] - reached <= COALESCED_BYTES:
            groups[-1].append(part)
        else:
            groups.append([part])
        reached = max(reached, part[1])
    return groups


class PositionedReader(io.RawIOBase):
    """Bytes of a file of known size, out of the piece of it that is in memory."""

    def __init__(self, size: int) -> None:
        self._size, self._position = size, 0
        self._start, self._held = 0, memoryview(b"")

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
            self._start, data = self._piece(len(target))
            self._held = memoryview(data)
        first = self._position - self._start
        part = self._held[first : first + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    @abstractmethod
    def _piece(self, wanted: int) -> tuple[int, bytes | memoryview]:
        """One that holds the byte at the position, and where it starts."""


class RangeReader(PositionedReader):
    """Through `fetch(start, length)`: few bytes here and there, more where they are read in order."""

    def __init__(self, size: int, fetch: Callable[[int, int], memoryview]) -> None:
        super().__init__(size)
        self._fetch, self._window = fetch, SMALLEST_BYTES

    def _piece(self, wanted: int) -> tuple[int, memoryview]:
        is_next = self._position == self._start + len(self._held)
        self._window = min(2 * self._window, LARGEST_BYTES) if is_next else SMALLEST_BYTES
        length = min(max(wanted, self._window), self._size - self._position)
        return self._position, self._fetch(self._position, length)
