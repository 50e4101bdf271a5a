"""Child processes that end with their parent, and when it says so."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

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
    """Ignore signals to the process group, and end with the parent; for processes started in `stop_signals_held`."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent() -> None:
    """End when the parent is gone: a killed parent cannot say so, and a rerun must not meet a second writer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
