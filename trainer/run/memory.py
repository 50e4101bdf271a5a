"""How much memory a step took."""

import os
import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that was allocated on a GPU since the last call; on a CPU, the process's peak so far.

    `ru_maxrss` counts KiB on Linux and bytes on macOS.
    """
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def memory_bytes(device: torch.device) -> int | None:
    """Return how much there is: of the GPU, or of this machine as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not set(names) <= os.sysconf_names.keys():
        return None
    page, pages = map(os.sysconf, names)
    return page * pages
