"""Child processes that leave it to their parent what a signal to all of them means."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends; a process started in it, until it calls `obey_parent_alone`.

    Signals go to the whole process group, and would kill a worker that is still importing.
    """
    resource_tracker.ensure_running()  # spawning would start it, and it lets signals through as it starts
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
