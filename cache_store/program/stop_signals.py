"""SIGTERM and Ctrl-C: a program stops at once, or asks its work to stop."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FORWARDED_S = 5.0
"""A SIGTERM this soon after the first signal is the same request: schedulers send theirs to every process of a job,
and torchrun then forwards its own to the ranks."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends; a process started in it, until it calls `obey_parent_alone`.

    Signals go to the whole process group, and would kill a worker that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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

    Yields a function that says whether either came.
    """
    ours, asked = os.getpid(), -math.inf

    def unwind(number: int, frame: object) -> None:
        nonlocal asked
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)  # a forked child dies of it, as its parent expects
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT or time.monotonic() - asked > FORWARDED_S:
            asked = time.monotonic()
            raise KeyboardInterrupt

    # What ignores Ctrl-C, as a job in a shell's background does, goes on to.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, unwind) for number in heard}
    try:
        yield lambda: asked > -math.inf
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(stop: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; a second SIGINT, or a SIGTERM that is no echo, acts without us."""
    previous: dict[signal.Signals, Any] = {}
    asked: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked is None:
            asked = clock()
            print("\nstopping; another Ctrl-C stops at once", file=sys.stderr)
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
