"""Measures how long each part of a worker was busy."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["source", "decoding", "encoding", "writing", "checking"]
"""A part of a worker's time; in `checking`, its first commit waits for the check of its device."""


class BusyTimes:
    """Seconds that each part was busy, added up by several threads; threads that share a part count as one."""

    def __init__(self, decode_threads: int = 1) -> None:
        self._threads: dict[Part, int] = {"source": decode_threads, "decoding": decode_threads}
        self._seconds, self._lock = defaultdict[Part, float](float), threading.Lock()
        self._within = threading.local()
        """Seconds of parts that were measured within the one that a thread is measuring."""

    def add(self, part: Part, seconds: float) -> None:
        with self._lock:
            self._seconds[part] += seconds / self._threads.get(part, 1)

    @contextmanager
    def measured(self, part: Part) -> Iterator[None]:
        """Add the time of a part, without that of parts measured within it."""
        outer, started = getattr(self._within, "seconds", 0.0), time.monotonic()
        self._within.seconds = 0.0
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.add(part, seconds - self._within.seconds)
            self._within.seconds = outer + seconds

    def take(self) -> dict[Part, float]:
        with self._lock:
            taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken
