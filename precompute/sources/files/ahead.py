"""A file at a URL read in order: blocks of it are fetched before they are asked for, several at the same time.

An answer takes some tens of milliseconds to begin, as long as a megabyte takes to come. So files that are read from
their beginning to their end are read through, gaps too; and parts that several threads ask for, in about the order in
which they lie, come out of shared blocks. Parts asked for here and there are fetched as they are.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from cache_store.storage.objects.client import pool
from cache_store.storage.range_reader import PositionedReader

BLOCK_BYTES = 2 << 20
"""Of a request, where a file is read in order: larger ones wait longer for each other, smaller ones for the store."""

BLOCKS_AHEAD = 8
"""Requests in flight for each file that is read in order."""

SMALLEST_BYTES = 32 << 10
"""Of a request at a place that nobody was near: a tar's headers and texts between two images."""

SKIPPED_BYTES = 256 << 10
"""Larger gaps are jumped over, which takes a request more; smaller ones are read."""

BLOCKS_HELD = 24
"""Blocks of all files together that threads share: 48 MiB."""

RUNS = 16
"""Places of a file at which it is read in order at the same time."""

FEW_PARTS = 4
"""Neighbours that are fetched by themselves: they may be all."""

SPARSE = 4
"""Where less than such a part of a run was asked for, its blocks are not worth it."""

Fetch = Callable[[int, int], bytes]
"""Bytes from a start to a stop."""


class Block(NamedTuple):
    start: int
    stop: int
    data: Future[bytes]


class AheadReader(PositionedReader):
    """Read from the beginning to the end by one thread, with gaps."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        super().__init__(size)
        self._fetch = fetch
        self._blocks = deque[Block]()
        """The one at the position, and those after it."""
        self._next = self._ahead = 0
        self._block_bytes = SMALLEST_BYTES
        self._last: int | None = None
        """Where the last read ended."""

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._last = self._position
        return count

    def _piece(self, wanted: int) -> tuple[int, bytes]:
        is_near = self._last is not None and 0 <= self._position - self._last <= SKIPPED_BYTES
        while self._blocks and not self._blocks[0].start <= self._position < self._blocks[0].stop:
            self._blocks.popleft().data.cancel()
        if not self._blocks:
            self._next = self._position
        self._block_bytes = min(2 * self._block_bytes, BLOCK_BYTES) if is_near else SMALLEST_BYTES
        self._ahead = min(2 * self._ahead + 1, BLOCKS_AHEAD) if is_near else 0
        while len(self._blocks) <= self._ahead and self._next < self._size:
            start, self._next = self._next, min(self._next + self._block_bytes, self._size)
            self._blocks.append(Block(start, self._next, pool().submit(self._fetch, start, self._next)))
        return self._blocks[0].start, self._blocks[0].data.result()

    def close(self) -> None:
        while self._blocks:
            self._blocks.popleft().data.cancel()
        super().close()


@dataclass
class Run:
    """Parts that were asked for one after the other, about in their order."""

    start: int
    stop: int
    parts: int = 0
    asked_bytes: int = 0

    @property
    def is_dense(self) -> bool:
        return self.parts > FEW_PARTS and self.asked_bytes * SPARSE >= self.stop - self.start


class SharedBlocks:
    """Blocks that threads of this process read in order, of all files; those used the longest ago are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = OrderedDict[tuple["NeighbourParts", int], Future[bytes]]()

    def get(self, file: "NeighbourParts", number: int, fetch: Fetch, size: int) -> Future[bytes]:
        """One that is here or on its way; one that could not be had is asked for again."""
        with self._lock:
            block = self._blocks.get((file, number))
            if block is None or (block.done() and block.exception()):
                start = number * BLOCK_BYTES
                block = pool().submit(fetch, start, min(start + BLOCK_BYTES, size))
            self._blocks[file, number] = block
            self._blocks.move_to_end((file, number))
            while len(self._blocks) > BLOCKS_HELD:
                self._blocks.popitem(last=False)
            return block


SHARED = SharedBlocks()


class NeighbourParts:
    """Parts of one file for several threads."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self._size, self._fetch = size, fetch
        self._lock = threading.Lock()
        self._runs = deque[Run](maxlen=RUNS)

    def part(self, start: int, stop: int) -> bytes:
        with self._lock:
            run = self._run(start, stop)
            ahead = min(run.asked_bytes // BLOCK_BYTES, BLOCKS_AHEAD) if run.is_dense else None
        if ahead is None:
            return self._fetch(start, stop)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        last_ahead = min(last + ahead, (self._size - 1) // BLOCK_BYTES)
        blocks = [SHARED.get(self, number, self._fetch, self._size) for number in range(first, last_ahead + 1)]
        offset = first * BLOCK_BYTES
        whole = [block.result() for block in blocks[: last + 1 - first]]
        data = whole[0] if len(whole) == 1 else b"".join(whole)
        return data[start - offset : stop - offset]

    def _run(self, start: int, stop: int) -> Run:
        """The one that a part belongs to, which grows by it."""
        near = (run for run in self._runs if run.start <= start <= run.stop + BLOCK_BYTES)
        if (run := next(near, None)) is None:
            self._runs.appendleft(run := Run(start, stop))  # the oldest is dropped
        run.stop = max(run.stop, stop)
        run.parts += 1
        run.asked_bytes += stop - start
        return run
