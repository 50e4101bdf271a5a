"""How many cores there are."""

import os


def usable_cores() -> int:
    """Those that this process may run on, of all that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
