"""One thread a process: tests run side by side, and OpenMP threads that outnumber cores wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
