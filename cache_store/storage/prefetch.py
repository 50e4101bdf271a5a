"""Read ahead: neighbouring parts of a file, a file in order, announced files, and work of any kind.

A store behind a network takes as long to begin an answer as to send a megabyte. So bytes that will probably be read
next are requested early, several requests at the same time.
"""

import io
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from cache_store.storage.threads import complete, map_concurrently, submit

COALESCED_BYTES = 64 << 10
"""Ranges with a gap of at most this many bytes are fetched as one."""

BLOCK_BYTES = 2 << 20
"""Bytes per request for parts read in order: larger requests delay each other, smaller ones wait for the store."""

BLOCKS_AHEAD = 8
"""Most blocks requested beyond the one that is read: one more for each block's bytes that a run has read."""

PART_BYTES = 8 << 20
"""A larger part of a file is fetched in pieces of this size, several at the same time."""

STREAM_BYTES = 32 << 10
"""Least bytes that a stream reads at a time, such as a tar's headers and texts between two images."""

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


def keep_ahead(begun: Iterable[V], ahead: int) -> Iterator[V]:
    """Yield items, whose work an iterator begins, in order while `ahead` later ones are in progress."""
    waiting = deque[V]()
    for item in begun:
        waiting.append(item)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


class SharedResults(Generic[K, V]):
    """At most `held` results by key, shared by threads: the least recently used are dropped, failed ones made again."""

    def __init__(self, make: Callable[[K], V], held: int) -> None:
        self._make, self._held = make, held
        self._results, self._lock = OrderedDict[K, Future[V]](), threading.Lock()

    def __contains__(self, key: K) -> bool:
        return key in self._results

    def get(self, key: K) -> V:
        """Return the result; make it in this thread unless it is being made."""
        result, is_new = self._result(key)
        if is_new:
            complete(result, partial(self._make, key))
        return result.result()

    def begin(self, keys: Iterable[K], start: Callable[[Callable[[], None]], object]) -> None:
        """Pass a function that makes the result of a new key to `start`, which calls it in another thread."""
        for key in keys:
            result, is_new = self._result(key)
            if is_new:
                start(partial(complete, result, partial(self._make, key)))

    def _result(self, key: K) -> tuple[Future[V], bool]:
        with self._lock:
            result = self._results.get(key)
            if is_new := result is None or bool(result.done() and result.exception()):
                result = Future()
            assert result is not None
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self._held:
                self._results.popitem(last=False)
            return result, is_new


class AnnouncedResults(Generic[V]):
    """Results by name, each read once; results of announced names are made ahead, FILES_AHEAD at a time."""

    def __init__(self, make: Callable[[str], V]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._coming, self._begun = deque[str](), dict[str, Future[V]]()

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
                self._begun[name] = submit(self._make, name)


@dataclass
class Run:
    """Parts that were read roughly in order."""

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
        self.size, self._fetch = size, fetch
        self._lock, self._runs = threading.Lock(), deque[Run](maxlen=RUNS)

    def part(self, start: int, stop: int) -> bytes | memoryview:
        if stop - start > PART_BYTES:
            spans = [(first, min(first + PART_BYTES, stop)) for first in range(start, stop, PART_BYTES)]
            return b"".join(map_concurrently(lambda span: self._fetch(*span), spans))
        with self._lock:
            run = self._run_of(start, stop)
            ahead = min(run.read_bytes // BLOCK_BYTES, BLOCKS_AHEAD) if run.is_dense else None
        if ahead is None:
            return self._fetch(start, stop)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        last_ahead = min(last + ahead, (self.size - 1) // BLOCK_BYTES)
        SHARED.begin(((self, number) for number in range(first, last_ahead + 1)), submit)
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
        return self._fetch(start, min(start + BLOCK_BYTES, self.size))


SHARED = SharedResults[tuple[PartReader, int], bytes | memoryview](lambda key: key[0].block(key[1]), BLOCKS_HELD)
"""Blocks of all files that this process reads in order."""


class RangeStream(io.RawIOBase):
    """A stream for one thread over `part`, which returns the bytes from a start to a stop."""

    def __init__(self, size: int, part: Fetch) -> None:
        self._size, self._part, self._position = size, part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if (position := origin + offset) < 0:
            raise ValueError(f"seek to {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._position))
        data = self._part(self._position, self._position + count) if count else b""
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


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
    """Group parts, in ascending order, that are close to each other."""
    groups: list[list[Span]] = []
    reached = 0
    for part in parts:
        if groups and part[0] - reached <= COALESCED_BYTES:
            groups[-1].append(part)
        else:
            groups.append([part])
        reached = max(reached, part[1])
    return groups
