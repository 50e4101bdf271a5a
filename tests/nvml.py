"""A stand-in for NVML on a machine without a GPU: it knows one, by the UUID `one`, which is busy half of the time."""

import sys
import threading
from types import SimpleNamespace

import pytest

import cache_store.program.gpu_use as gpu_use

PATIENCE_S = 60


class Nvml:
    """Module `pynvml`, as far as it is used."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.reads, self._read_twice = 0, threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in ("GPU-one", "GPU-part"):
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> SimpleNamespace:  # noqa: N802
        if gpu == "GPU-part":
            raise self.NVMLError
        self.reads += 1
        if self.reads > 1:
            self._read_twice.set()
        return SimpleNamespace(gpu=50)

    def wait_for_a_reading(self) -> None:
        assert self._read_twice.wait(PATIENCE_S)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_use, "PERIOD_S", 0.001)
    return nvml
