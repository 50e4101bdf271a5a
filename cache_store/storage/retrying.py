"""Ask a store again: with pauses where it is busy or silent, a few times where an answer was cut or damaged."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, TypeVar

from cache_store.log import log_warning
from cache_store.storage.callers import GRACE_S, UPLOAD_GRACE_S, in_flight, pool
from cache_store.storage.files import MAX_READ_BYTES
from cache_store.storage.remote import WrappedStore
from cache_store.storage.verbs import Data, Ranges, Version

BUSY_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 90.0, 1.0, 10.0
"""Seconds that one operation waits for a busy or silent store; first and longest pause, each after a round of a
client's own retries.
"""

TOLD_EACH_S = 30.0
"""Seconds between two messages about waiting, since many operations wait at the same time."""

ATTEMPTS = 4
"""For an answer that is cut short, and for a name that several programs create at once."""

PAGE = 1_000
"""Names in a listing at a time, as S3 gives them."""

SMALL_BYTES = 1 << 20
"""Largest upload for which a stop waits no longer than for other calls."""

HEARD: set[str] = set()
"""Buckets that have answered this process once; if such a store falls silent, it is waited for like a busy one."""

JITTER = random.Random()
"""For pauses; not the generator that a training run may have seeded."""

T = TypeVar("T")

Kind = Literal["cut", "conflict", "broken off", "silent", "busy"]
"""How a request failed: the first three are over at once, if ever; no answer at all; the store has too much to do."""


class PassingError(OSError):
    """A request failed that may be answered if it is made again."""

    kind: Kind
    status: str = ""
    """The answer's, as `503 Service Unavailable SlowDown`."""


def passing(error: OSError, kind: Kind, status: str = "") -> PassingError:
    """Return the error as one that may pass."""
    found = PassingError(error.errno, error.strerror, error.filename)
    found.kind, found.status = kind, status
    return found


@dataclass(frozen=True)
class RetryingStore(WrappedStore):
    """A store whose failures may pass. What it does may take effect twice.

    Calls are made in threads of `pool`, so that the waiting thread reacts to signals.
    """

    def stat(self, name: str) -> Version:
        return self._ask(name, lambda: self.inner.stat(name))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        return self._ask(name, lambda: self.inner.read(name, at_most))

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return in_flight(lambda each: self._ask(each.name, lambda: self.inner.fetch([each])[0]), wanted)

    def list(self, folder: str = "") -> list[str]:
        return self._ask(folder, lambda: self.inner.list(folder))

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield every file below; a listing that broke off goes on where it was."""
        files = self.inner.walk(after)

        def page() -> list[tuple[str, Version | None]]:
            nonlocal files
            try:
                return [*islice(files, PAGE)]
            except PassingError:
                files = self.inner.walk(after)  # an iterator that has failed cannot continue
                raise

        while found := self._ask("", page):
            yield from found
            after = found[-1][0]

    def put_whole(self, name: str, data: Data) -> None:
        self._ask(name, lambda: self.inner.put_whole(name, data), grace_s(data))

    def put_if_absent(self, name: str, data: Data) -> bool:
        return self._ask(name, lambda: self.inner.put_if_absent(name, data), grace_s(data))

    def delete(self, name: str) -> None:
        self._ask(name, lambda: self.inner.delete(name))

    def _ask(self, name: str, call: Callable[[], T], grace: float = GRACE_S) -> T:
        bucket = "/".join(str(self).split("/")[:3])
        return pool().run(lambda: asked(bucket, call), grace)


def grace_s(data: Data) -> float:
    """Return how long an upload may still take once its program was asked to stop."""
    return UPLOAD_GRACE_S if len(data) > SMALL_BYTES else GRACE_S


def asked(bucket: str, call: Callable[[], T]) -> T:
    """Make a call and return its result; repeat it while the store is busy, and a few times after other failures."""
    left, tries = pauses(), count(1)
    while True:
        try:
            answer = call()
            HEARD.add(bucket)
            return answer
        except PassingError as error:
            if error.kind in ("cut", "conflict", "broken off") and next(tries) < ATTEMPTS:
                if error.kind == "conflict":
                    time.sleep(FIRST_PAUSE_S * JITTER.random())
                continue
            is_away = error.kind in ("silent", "broken off") and bucket in HEARD
            if not (error.kind == "busy" or is_away) or (waiting := next(left, None)) is None:
                raise error from None
            left_s, pause_s = waiting
            tell_of_waiting(error, left_s)
            time.sleep(pause_s)


def pauses() -> Iterator[tuple[float, float]]:
    """Yield the seconds left and the next pause, until BUSY_S have passed.

    Pauses grow and are random, so that callers refused together do not come back together.
    """
    until_s, pause_s = time.monotonic() + BUSY_S, FIRST_PAUSE_S
    while (left_s := until_s - time.monotonic()) > 0:
        yield left_s, min(left_s, pause_s * JITTER.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class LastWaitMessage:
    """The time of the last message about waiting for a store."""

    lock = threading.Lock()
    at_s = -TOLD_EACH_S


def tell_of_waiting(error: PassingError, left_s: float) -> None:
    with LastWaitMessage.lock:
        if time.monotonic() - LastWaitMessage.at_s < TOLD_EACH_S:
            return
        LastWaitMessage.at_s = time.monotonic()
    said = f"answers {error.status}" if error.kind == "busy" else "does not answer any more"
    log_warning(f"the store {said}: waiting, for up to {left_s:.0f} s more: {error.filename}")
