"""Benchmarks: run each as `python -m benchmarks.NAME`; the last line it prints is a JSON record."""

import os

# OpenMP threads that spin while they wait take cores from the threads that they wait for, if anything else runs on the
# host: measured here, the encoder becomes up to ten times slower. Set this before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
