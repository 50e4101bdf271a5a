"""One thread a process: tests run side by side, and OpenMP threads that outnumber cores wait for each other."""

import os
import signal
from collections.abc import Iterator

import pytest

# A shell ignores Ctrl-C in what it starts in the background, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Encoders use two threads all the same; with as many processes as cores, threads that spin for each other burn what
# others need: a toy encode took 8 ms of CPU time in place of 2. libgomp reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray reads it once a process, and a driver that is of another mind than its cluster is not answered.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="module")
def threads_as_in_a_child() -> Iterator[None]:
    """For runs compared bit for bit with those of child processes: a build before them may have left two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield
    torch.set_num_threads(before)
