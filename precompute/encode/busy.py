"""What each part of a build was busy with, and which of them held the others back."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Part = Literal["source", "decoding", "encoding", "writing"]

REMEDIES: dict[Part, str] = {
    "source": "faster storage helps, or more threads that wait for it (run.decode_threads)",
    "decoding": "more cores help, or image.decode: reduced where photographs are large",
    "encoding": "more or faster GPUs help",
    "writing": "more workers help (run.workers), or a faster disk",
}
"""Advice for the part that is the slowest."""

IN_FLOAT32 = ", or a cache of encoder.compute_dtype: bfloat16"
"""Added to the advice for encoding in float32."""


class BusyTimes:
    """Seconds by part, added up by several threads; of parts that several threads share, as if they were one."""

    def __init__(self, decode_threads: int) -> None:
        self._threads: dict[Part, int] = {"source": decode_threads, "decoding": decode_threads}
        self._seconds, self._lock = defaultdict[Part, float](float), threading.Lock()

    def add(self, part: Part, seconds: float) -> None:
        with self._lock:
            self._seconds[part] += seconds / self._threads.get(part, 1)

    @contextmanager
    def measured(self, part: Part) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(part, time.monotonic() - started)

    def take(self) -> dict[Part, float]:
        """Return the times added since the last call."""
        with self._lock:
            taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


def slowest(seconds: Mapping[Part, float]) -> Part | None:
    """The part that was busy most of the time, if any was."""
    return max(seconds, key=lambda part: seconds[part], default=None)
