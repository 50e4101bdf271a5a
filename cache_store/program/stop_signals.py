"""SIGTERM and Ctrl-C: a program stops at once, or asks its work to stop."""

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
"""A SIGTERM this soon after the first signal is the same request: schedulers send theirs to every process of a job,
and torchrun then forwards its own to the ranks."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RETRY, RETRY_S = signal.SIGALRM, 0.05
"""Our own timer's signal: a stop that had to wait, or was swallowed, is tried again after this."""


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends; a process started in it, until it calls `obey_parent_alone`.

    Signals go to the whole process group, and would kill a worker that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, RETRY))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_alone() -> None:
    """Ignore signals to the process group; for processes started in `stop_signals_held`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def unwound_by_signals() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM end the block as Ctrl-C does, so that scratch files are removed and the exit code is 3.

    The first signal waits for the end of an import. Yields a function that says whether a signal came.
    """
    ours, asked = os.getpid(), -math.inf

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)  # a forked child dies of it, as its parent expects
            os.kill(os.getpid(), number)
        elif number != signal.SIGTERM or time.monotonic() - asked > FORWARDED_S:
            waits = (number == RETRY or asked == -math.inf) and is_importing(frame)
            asked = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, RETRY_S if waits else 0)
            if not waits:
                raise KeyboardInterrupt

    # What ignores Ctrl-C, as a job in a shell's background does, goes on to.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, unwind) for number in (*heard, RETRY)}
    with interrupts_kept():
        try:
            yield lambda: asked > -math.inf
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)


def stop_retrying() -> None:
    """Cancel a stop that waits to be tried again: it would interrupt the message of the stop that is told now."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def is_importing(frame: FrameType | None) -> bool:
    """Whether `frame` runs within an import: an exception there can abort the program in C++ code, or be swallowed."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Retry a KeyboardInterrupt that Python could only print: one raised in a `__del__` or in a weakref's callback."""
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
    """Call `stop` at the first SIGTERM or SIGINT; a second SIGINT, or a SIGTERM that is no echo, acts without us."""
    previous: dict[signal.Signals, Any] = {}
    asked: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked is None:
            asked = clock()
            log_info("stopping; another Ctrl-C stops at once")
            stop()
        elif number == signal.SIGINT or clock() - asked > FORWARDED_S:
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
