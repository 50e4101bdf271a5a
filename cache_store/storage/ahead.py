"""Read ahead: a file in order, neighbouring parts of a file, and files whose names are announced.

A store behind a network takes some tens of milliseconds to begin an answer, as long as it takes to send a megabyte. So
bytes that will probably be read next are requested early, several requests at the same time.
"""

import io
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from cache_store.storage.calls import Call, pool

COALESCED_BYTES = 64 << 10
"""Ranges with a gap of at most this many bytes are fetched as one."""

BLOCK_BYTES = 2 << 20
"""Bytes per request for a file read in order: larger requests delay each other, smaller ones wait for the store."""

BLOCKS_AHEAD = 8
"""Requests in flight for each file that is read in order."""

SMALLEST_BYTES = 32 << 10
"""Bytes of the first request at a new place, such as a tar's headers and texts between two images."""

SKIPPED_BYTES = 256 << 10
"""Smaller gaps are read; larger ones are skipped at the cost of another request."""

BLOCKS_HELD = 24
"""Most blocks in memory, of all files together, shared by threads: 48 MiB."""

RUNS = 16
"""Most runs per file that are followed at the same time."""

FEW_PARTS = 4
"""Parts of a run that are fetched one by one, since there may be no more."""

SPARSE = 4
"""Blocks are not worth fetching if less than 1/SPARSE of a run's bytes is read."""

FILES_AHEAD = 32
"""Files in flight or in memory, of about 100 KB each: 1,600 per second from a store that takes 20 ms for an answer."""

Fetch = Callable[[int, int], bytes | memoryview]
"""Returns the bytes from a start to a stop."""

Span = tuple[int, int]
"""The first byte, and the byte after the last one."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedResults(Generic[K, V]):
    """At most `held` results by key, shared by threads: the least recently used are dropped, failed ones made again."""

    def __init__(self, make: Callable[[K], V], held: int) -> None:
        self._make, self._held = make, held
        self._calls, self._lock = OrderedDict[K, Call[V]](), threading.Lock()

    def __contains__(self, key: K) -> bool:
        return key in self._calls

    def get(self, key: K) -> V:
        """Return the result; make it in this thread unless it is being made."""
        call, is_new = self._call(key)
        if is_new:
            call.run()
        return call.result()

    def begin(self, keys: Iterable[K], start: Callable[[Call[V]], object]) -> None:
        """Pass the call of every new key to `start`, which runs it in another thread."""
        for key in keys:
            call, is_new = self._call(key)
            if is_new:
                start(call)

    def _call(self, key: K) -> tuple[Call[V], bool]:
        with self._lock:
            call = self._calls.get(key)
            if is_new := call is None or bool(call.done() and call.exception()):
                call = Call(lambda: self._make(key))
            assert call is not None
            self._calls[key] = call
            self._calls.move_to_end(key)
            while len(self._calls) > self._held:
                self._calls.popitem(last=False)
            return call, is_new


class AnnouncedResults(Generic[V]):
    """Results by name, each read once; results of announced names are made ahead, FILES_AHEAD at a time."""

    def __init__(self, make: Callable[[str], V]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._coming, self._begun = deque[str](), dict[str, Call[V]]()

    def expect(self, names: Iterable[str]) -> None:
        """Announce names that `get` will be called with, roughly in this order."""
        with self._lock:
            self._coming.extend(names)
            self._begin()

    def get(self, name: str) -> V:
        """Return the result that was made ahead, or make it now; its error is raised here."""
        with self._lock:
            begun = self._begun.pop(name, None)
            if begun is None and name in self._coming:
                self._coming.remove(name)
            self._begin()
        return begun.result() if begun else self._make(name)

    def _begin(self) -> None:
        while self._coming and len(self._begun) < FILES_AHEAD:
            if (name := self._coming.popleft()) not in self._begun:  # a list may contain a name twice
                self._begun[name] = pool().submit(self._make, name)


class Block(NamedTuple):
    start: int
    stop: int
    data: Call[bytes | memoryview]


class AheadReader(io.RawIOBase):
    """A file of known size as a stream for one thread: it reads many blocks ahead in order, small pieces at random."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self._size, self._fetch, self._position = size, fetch, 0
        self._blocks = deque[Block]()
        """The block at the position, and the blocks after it."""
        self._next = 0
        """The start of the next block to request."""
        self._ahead, self._block_bytes = 0, SMALLEST_BYTES
        self._last: int | None = None
        """The position at which the last read ended."""

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
        count = min(len(target), self._size - self._position)
        if count <= 0:
            return 0
        if not self._has_block():
            self._request_blocks(count)
        first = self._position - self._blocks[0].start
        part = memoryview(self._blocks[0].data.result())[first : first + count]
        target[: len(part)] = part
        self._position = self._last = self._position + len(part)
        return len(part)

    def _has_block(self) -> bool:
        """Return whether the first block holds the position."""
        return bool(self._blocks) and self._blocks[0].start <= self._position < self._blocks[0].stop

    def _request_blocks(self, wanted: int) -> None:
        """Request a block at the position, and more after it if the file is read in order or much of it at once."""
        is_near = self._last is not None and 0 <= self._position - self._last <= SKIPPED_BYTES
        while self._blocks and not self._has_block():
            self._blocks.popleft().data.cancel()
        if not self._blocks:
            self._next = self._position
        self._block_bytes = min(2 * self._block_bytes, BLOCK_BYTES) if is_near else SMALLEST_BYTES
        self._ahead = min(2 * self._ahead + 1, BLOCKS_AHEAD) if is_near else 0
        ahead, end = max(self._ahead, min((wanted - 1) // BLOCK_BYTES, BLOCKS_AHEAD)), self._position + wanted
        while len(self._blocks) <= ahead and self._next < self._size:
            start, length = self._next, max(self._block_bytes, min(end - self._next, BLOCK_BYTES))
            self._next = min(start + length, self._size)
            self._blocks.append(Block(start, self._next, pool().submit(self._fetch, start, self._next)))

    def close(self) -> None:
        while self._blocks:
            self._blocks.popleft().data.cancel()
        super().close()


@dataclass
class Run:
    """Parts that were read one after the other, roughly in order."""

    start: int
    stop: int
    parts: int = 0
    read_bytes: int = 0

    @property
    def is_dense(self) -> bool:
        return self.parts > FEW_PARTS and self.read_bytes * SPARSE >= self.stop - self.start


class PartReader:
    """Reads parts of one file for several threads; parts in rough order are cut out of shared blocks."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self._size, self._fetch = size, fetch
        self._lock, self._runs = threading.Lock(), deque[Run](maxlen=RUNS)

    def part(self, start: int, stop: int) -> bytes | memoryview:
        with self._lock:
            run = self._run_of(start, stop)
            ahead = min(run.read_bytes // BLOCK_BYTES, BLOCKS_AHEAD) if run.is_dense else None
        if ahead is None:
            return self._fetch(start, stop)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        last_ahead = min(last + ahead, (self._size - 1) // BLOCK_BYTES)
        SHARED.begin(((self, number) for number in range(first, last_ahead + 1)), pool().start)
        whole = [SHARED.get((self, number)) for number in range(first, last + 1)]
        data = whole[0] if len(whole) == 1 else b"".join(whole)
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _run_of(self, start: int, stop: int) -> Run:
        """Return the run that a part belongs to, extended by the part."""
        near = (run for run in self._runs if run.start <= start <= run.stop + BLOCK_BYTES)
        if (run := next(near, None)) is None:
            self._runs.appendleft(run := Run(start, stop))  # the deque drops the oldest
        run.stop = max(run.stop, stop)
        run.parts += 1
        run.read_bytes += stop - start
        return run

    def block(self, number: int) -> bytes | memoryview:
        start = number * BLOCK_BYTES
        return self._fetch(start, min(start + BLOCK_BYTES, self._size))


SHARED = SharedResults[tuple[PartReader, int], bytes | memoryview](lambda key: key[0].block(key[1]), BLOCKS_HELD)
"""Blocks of all files that this process reads in order."""


def read_parts(parts: Sequence[Span], fetch: Callable[[Sequence[Span]], Iterable[Any]]) -> list[memoryview]:
    """Return parts of a file, given in any order; parts close to each other are fetched as one span."""
    groups = group_neighbours(sorted(part for part in parts if part[0] < part[1]))
    spans = [(group[0][0], max(end for _, end in group)) for group in groups]
    found = dict.fromkeys(parts, memoryview(b""))
    for (first, _), group, data in zip(spans, groups, fetch(spans), strict=True):
        view = memoryview(data)
        found |= {(start, end): view[start - first : end - first] for start, end in group}
    return [found[part] for part in parts]


def group_neighbours(parts: Sequence[Span]) -> list[list[Span]]:
    """Group parts, given in ascending order, that are close to each other."""
    groups: list[list[Span]] = []
    reached = 0
    for part in parts:
        if groups and part[0] - reached <= COALESCED_BYTES:
            groups[-1].append(part)
        else:
            groups.append([part])
        reached = max(reached, part[1])
    return groups
