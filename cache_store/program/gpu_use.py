"""How busy a GPU is, by NVML, NVIDIA's management library, if its package nvidia-ml-py is installed."""

import threading
from importlib import import_module
from typing import Any

PERIOD_S = 1.0
"""Seconds between two readings. NVML averages over the last second at most: no reading covers the time before."""


class GpuMeter:
    """Reads in a thread of its own, once a second, the share of time in which a GPU ran any kernel; close it."""

    def __init__(self, uuid: str | None) -> None:
        """Begin to read the GPU, named as torch names it; read nothing if there is none, or if NVML has no figure."""
        self._ended, self._readings = threading.Event(), list[float]()
        if uuid is None:
            return
        try:
            nvml = import_module("pynvml")
        except ModuleNotFoundError:
            return
        try:
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            return
        threading.Thread(target=self._read, args=[nvml, gpu], daemon=True).start()

    def _read(self, nvml: Any, gpu: Any) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self._readings.append(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
        except nvml.NVMLError:  # a part of a GPU (MIG) has no figure
            return

    def take(self) -> list[float]:
        taken, self._readings = self._readings, []
        return taken

    def close(self) -> None:
        self._ended.set()
