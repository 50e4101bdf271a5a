"""The processes that a program starts, and when they stop."""

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
    """SIGINT and SIGTERM wait until the block ends, and a process started in it stays deaf until `obey_parent_alone`.

    They go to the whole group, and would end a process that is still importing as no worker is to end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_alone() -> None:
    """End with the parent and when it says so, whatever the group is sent; for processes of `stop_signals_held`."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent() -> None:
    """A killed parent cannot tell us to stop, and a rerun of a build must not meet two writers in one shard."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
