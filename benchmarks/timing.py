"""Time rivals in turns, so that other load on the machine affects all of them equally."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any


def interleaved_seconds(
    rivals: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of every run, by rival, after one warm-up run each; a rival returns when its work is done."""
    for run in rivals.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, run in rivals.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, minimum and maximum, rounded to `digits` decimal places."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Amount per second of each run."""
    return [amount / each for each in seconds]


def speedups(baseline: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Return how many times faster than the baseline ours is, round by round."""
    return [theirs / mine for theirs, mine in zip(baseline, ours, strict=True)]
