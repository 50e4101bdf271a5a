"""Benchmarks: run each as `python -m benchmarks.NAME`; the last line it prints is a JSON record."""

import os

# OpenMP threads that wait by spinning take the core from whoever they wait for as soon as anything else runs on the
# host; measured here, that costs the encoder up to ten times its speed. It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
