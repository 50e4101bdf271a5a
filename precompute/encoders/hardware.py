"""Describe an encoder's device for the commit record: a latent's bits may depend on all of it."""

import platform
import re
from functools import cache
from pathlib import Path

import torch

CPUINFO, DRIVER = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")


@cache
def hardware_of(device: torch.device) -> dict[str, str]:
    """Describe a GPU by name, driver, CUDA and cuDNN; a CPU by name and widest instructions in use."""
    if device.type != "cuda":
        return {"cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}
    found = {"gpu": torch.cuda.get_device_name(device), "driver": driver_version(), "cuda": torch.version.cuda}
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if cudnn is not None:
        found["cudnn"] = str(cudnn)  # 91002 is 9.10.2
    return {name: value for name, value in found.items() if value}


def gpu_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def cpu_name() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver_version() -> str:
    text = DRIVER.read_text() if DRIVER.exists() else ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""
