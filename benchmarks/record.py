"""One JSON record per benchmark run: its figures, and the conditions under which they were measured."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cache_store.program.running import usable_cores

ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables that change a CPU's speed."""


def print_record(benchmark: str, packages: tuple[str, ...], **measured: Any) -> None:
    """Print the figures and their conditions as one line of JSON, the last line on stdout."""
    conditions = {
        "benchmark": benchmark,
        "command": shlex.join(sys.orig_argv),
        "revision": git_revision(),
        "hardware": hardware(),
        "versions": versions(packages),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }
    print(json.dumps(conditions | measured), flush=True)


def hardware() -> dict[str, Any]:
    """Describe this host: processor, usable cores, memory, load, and GPUs if torch is imported."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "gpus": gpu_names(),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    if "torch" not in sys.modules:
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_revision() -> str | None:
    """Return the commit, with a `+` if files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
