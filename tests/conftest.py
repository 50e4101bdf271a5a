"""One thread a process: tests run side by side, and OpenMP threads that outnumber cores wait for each other."""

import os
import signal

# A shell ignores Ctrl-C in what it starts in the background, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Encoders use two threads all the same; with as many processes as cores, threads that spin for each other burn what
# others need: a toy encode took 8 ms of CPU time in place of 2. libgomp reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
