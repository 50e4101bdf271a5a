"""Repeat requests to a store: a few times in seconds, then with growing pauses while the store is busy or silent."""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cache_store.errors import Interrupted
from cache_store.log import log_warning
from cache_store.storage.threads import STOP_REQUEST

ATTEMPTS = 4
"""Attempts of every request that fails; beyond these, only a store that is away is waited for."""

PATIENCE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 120.0, 0.2, 10.0
"""Seconds that one request waits for a store that is away; its first and longest pause, which doubles in between."""

WARNED_EACH_S = 30.0
"""Seconds between two messages about waiting, since many requests wait at the same time."""

ANSWERED: set[str] = set()
"""Buckets that have answered this process. Only these are waited for if silent; others may have a wrong address."""

JITTER = random.Random()
"""Generator for pauses, separate from the one that a training run may have seeded."""

GIVEN_UP = "the object store had not answered yet; run the same command again"

T = TypeVar("T")


class TransientError(OSError):
    """A request failed that may succeed if it is repeated."""

    is_away = False
    """Whether the store is busy or silent, so that it is worth waiting for."""
    status = ""
    """The answer's status, such as `503 Service Unavailable SlowDown`; empty without an answer."""


def transient_error(error: OSError, status: str = "", *, is_away: bool = False) -> TransientError:
    found = TransientError(error.errno, error.strerror, error.filename)
    found.is_away, found.status = is_away, status
    return found


def repeat(bucket: str, request: Callable[[], T]) -> T:
    """Return the result of a request to a bucket, made again after a TransientError; it may then take effect twice.

    Raises Interrupted if a stop was requested.
    """
    until_s, pause_s = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    attempt = 0
    while True:
        attempt += 1
        try:
            answer = request()
        except TransientError as error:
            if STOP_REQUEST.is_set():
                raise Interrupted(GIVEN_UP) from error
            left_s = until_s - time.monotonic()
            if attempt >= ATTEMPTS:
                if not (error.is_away and (error.status or bucket in ANSWERED) and left_s > 0):
                    raise
                warn_of_waiting(error, left_s)
            STOP_REQUEST.wait(pause_s * JITTER.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            ANSWERED.add(bucket)
            return answer


class LastWarning:
    """When this process last printed that it waits for a store."""

    lock = threading.Lock()
    at_s = -WARNED_EACH_S


def warn_of_waiting(error: TransientError, left_s: float) -> None:
    with LastWarning.lock:
        if time.monotonic() - LastWarning.at_s < WARNED_EACH_S:
            return
        LastWarning.at_s = time.monotonic()
    problem = f"answers {error.status}" if error.status else "does not answer any more"
    log_warning(f"the store {problem}: waiting, for up to {left_s:.0f} s more: {error.filename}")
