"""Repeat calls to a store: with pauses while it is busy or silent, a few times after a damaged answer."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, TypeVar

from cache_store.log import log_warning
from cache_store.storage.calls import GRACE_S, UPLOAD_GRACE_S, map_concurrently, pool
from cache_store.storage.remote import WrappedStore
from cache_store.storage.verbs import MAX_READ_BYTES, Data, Ranges, Version

BUSY_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 90.0, 1.0, 10.0
"""Seconds that one operation waits for a busy or silent store; its first and longest pause. Each pause follows a round
of the client's own retries.
"""

WARNED_EACH_S = 30.0
"""Seconds between two messages about waiting, since many operations wait at the same time."""

ATTEMPTS = 4
"""Attempts after an answer that is cut short, or if several programs create one name at the same time."""

PAGE = 1_000
"""Names per page of a listing, as in S3."""

SMALL_BYTES = 1 << 20
"""Largest upload that gets no longer grace after a stop than other calls."""

ANSWERED: set[str] = set()
"""Buckets that have answered this process; if such a store falls silent, it is waited for like a busy one."""

JITTER = random.Random()
"""Generator for pauses, separate from the one that a training run may have seeded."""

T = TypeVar("T")

FailureKind = Literal["cut", "conflict", "broken off", "silent", "busy"]
"""How a request failed. cut, conflict and broken off: a repeat helps at once or never; silent: there was no answer;
busy: the store has too much to do.
"""


class TransientError(OSError):
    """A request failed that may succeed if it is repeated."""

    kind: FailureKind
    status: str = ""
    """The answer's status, such as `503 Service Unavailable SlowDown`."""


def transient_error(error: OSError, kind: FailureKind, status: str = "") -> TransientError:
    """Return the error as a TransientError."""
    found = TransientError(error.errno, error.strerror, error.filename)
    found.kind, found.status = kind, status
    return found


@dataclass(frozen=True)
class RetryingStore(WrappedStore):
    """A store that repeats calls which raise a TransientError; a call may then take effect twice.

    Calls run in threads of `pool`, so that the waiting thread reacts to signals.
    """

    def stat(self, name: str) -> Version:
        return self._call(name, lambda: self.inner.stat(name))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        return self._call(name, lambda: self.inner.read(name, at_most))

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return map_concurrently(lambda each: self._call(each.name, lambda: self.inner.fetch([each])[0]), wanted)

    def list(self, folder: str = "") -> list[str]:
        return self._call(folder, lambda: self.inner.list(folder))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield every file; a listing that broke off continues at the same place."""
        files = self.inner.walk(after)

        def page() -> list[tuple[str, Version | None]]:
            nonlocal files
            try:
                return [*islice(files, PAGE)]
            except TransientError:
                files = self.inner.walk(after)  # an iterator that has failed cannot continue
                raise

        while found := self._call("", page):
            yield from found
            after = found[-1][0]

    def put_whole(self, name: str, data: Data) -> None:
        self._call(name, lambda: self.inner.put_whole(name, data), grace_s(data))

    def put_if_absent(self, name: str, data: Data) -> bool:
        return self._call(name, lambda: self.inner.put_if_absent(name, data), grace_s(data))

    def delete(self, name: str) -> None:
        self._call(name, lambda: self.inner.delete(name))

    def _call(self, name: str, call: Callable[[], T], grace: float = GRACE_S) -> T:
        bucket = "/".join(str(self).split("/")[:3])
        return pool().wait_for(lambda: call_until_answered(bucket, call), grace)


def grace_s(data: Data) -> float:
    """Return how long an upload may still take after a stop."""
    return UPLOAD_GRACE_S if len(data) > SMALL_BYTES else GRACE_S


def call_until_answered(bucket: str, call: Callable[[], T]) -> T:
    """Return the result of a call; repeat it while the store is busy, and a few times after other failures."""
    left, tries = pauses(), count(1)
    while True:
        try:
            answer = call()
            ANSWERED.add(bucket)
            return answer
        except TransientError as error:
            if error.kind in ("cut", "conflict", "broken off") and next(tries) < ATTEMPTS:
                if error.kind == "conflict":
                    time.sleep(FIRST_PAUSE_S * JITTER.random())
                continue
            is_away = error.kind in ("silent", "broken off") and bucket in ANSWERED
            if not (error.kind == "busy" or is_away) or (waiting := next(left, None)) is None:
                raise error from None
            left_s, pause_s = waiting
            warn_of_waiting(error, left_s)
            time.sleep(pause_s)


def pauses() -> Iterator[tuple[float, float]]:
    """Yield the seconds left and the next pause, until BUSY_S have passed.

    Pauses grow and are random, so that programs refused at the same time do not return at the same time.
    """
    until_s, pause_s = time.monotonic() + BUSY_S, FIRST_PAUSE_S
    while (left_s := until_s - time.monotonic()) > 0:
        yield left_s, min(left_s, pause_s * JITTER.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class LastWaitMessage:
    """When this process last printed that it waits for a store."""

    lock = threading.Lock()
    at_s = -WARNED_EACH_S


def warn_of_waiting(error: TransientError, left_s: float) -> None:
    with LastWaitMessage.lock:
        if time.monotonic() - LastWaitMessage.at_s < WARNED_EACH_S:
            return
        LastWaitMessage.at_s = time.monotonic()
    problem = f"answers {error.status}" if error.kind == "busy" else "does not answer any more"
    log_warning(f"the store {problem}: waiting, for up to {left_s:.0f} s more: {error.filename}")
