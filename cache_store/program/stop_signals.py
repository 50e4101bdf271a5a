"""Handle SIGTERM and Ctrl-C: stop the program at once, or ask its work to stop."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cache_store.log import log_info

FORWARDED_S = 5.0
"""A SIGTERM this soon after the first signal counts as the same request: a scheduler signals every process of a job,
and torchrun then forwards its own signal to the ranks.
"""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RETRY, RETRY_S = signal.SIGALRM, 0.05
"""Signal and delay of our timer, which repeats a stop that Python swallowed."""


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block.

    Processes started in the block do not receive them until they call `ignore_stop_signals`: a signal goes to the whole
    process group and would kill a worker that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, RETRY))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM, in a process started in `stop_signals_held`; only its parent stops it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def unwound_by_signals() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM end the block as Ctrl-C does, so that scratch files are removed and the exit code is 3.

    Yields a function that returns whether a signal came.
    """
    ours, last_signal_s = os.getpid(), -math.inf

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal last_signal_s
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)  # a forked child is ended by the signal, as its parent expects
            os.kill(os.getpid(), number)
        elif number != signal.SIGTERM or time.monotonic() - last_signal_s > FORWARDED_S:
            last_signal_s = time.monotonic()
            stop_retrying()
            raise KeyboardInterrupt

    # A process that ignores Ctrl-C, such as a shell's background job, continues to ignore it.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, unwind) for number in (*heard, RETRY)}
    with interrupts_kept():
        try:
            yield lambda: last_signal_s > -math.inf
        finally:
            stop_retrying()
            for number, handler in previous.items():
                signal.signal(number, handler)


def stop_retrying() -> None:
    """Cancel a stop that is to be repeated: it would interrupt the message about the stop."""
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise a KeyboardInterrupt again if Python could only print it: from a `__del__` or a weakref callback."""
    before = sys.unraisablehook

    def retry(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            before(unraisable)

    sys.unraisablehook = retry
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def stop_on_signals(stop: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; a second SIGINT, or a late SIGTERM, goes to the old handler."""
    previous: dict[signal.Signals, Any] = {}
    first_signal_s: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal first_signal_s
        if first_signal_s is None:
            first_signal_s = clock()
            log_info("stopping; another Ctrl-C stops at once")
            stop()
        elif number == signal.SIGINT or clock() - first_signal_s > FORWARDED_S:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in STOP_SIGNALS:
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
