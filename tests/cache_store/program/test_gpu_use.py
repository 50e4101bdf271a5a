"""A GPU's use is read beside the work; where NVML has no figure, nothing is read."""

import sys
from contextlib import closing

import pytest

from cache_store.program.gpu_use import GpuMeter
from tests.nvml import stand_in


def test_a_meter_gives_each_reading_once(monkeypatch):
    nvml = stand_in(monkeypatch)
    with closing(GpuMeter("one")) as meter:
        nvml.wait_for_a_reading()
        first = meter.take()
    assert set(first) == {0.5}
    assert len(first) + len(meter.take()) <= nvml.reads


@pytest.mark.parametrize("uuid", [None, "another", "part", "one"])
def test_without_a_figure_or_the_package_nothing_is_read(monkeypatch, uuid):
    nvml = stand_in(monkeypatch)
    if uuid == "one":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with closing(GpuMeter(uuid)) as meter:
        assert meter.take() == []
    assert nvml.reads == 0
