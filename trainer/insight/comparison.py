"""Two configs side by side: what a step takes with each, in turns, on the same batches."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 3
"""Steps of each before the first turn."""

TURNS = 5
"""Runs of each side in turn, so that a slow machine slows both."""

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for an interval of 95 %, by degrees of freedom from 1 on; beyond them 1.96 + 2.5 / degrees is as near."""


@dataclass(frozen=True)
class Turn:
    """Some steps of one side."""

    losses: Sequence[float]
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of B against A."""

    speedup: float
    """How many times as fast a step of B is: the geometric mean over turns."""
    low: float
    high: float
    """Its interval of 95 %."""
    step_s: tuple[float, float]
    """Medians over turns, of A and B."""
    peak_bytes: tuple[int, int]
    max_loss_delta: float | None
    """The largest difference of one step's losses; None where the two do not see the same batches."""
    steps: int
    turns: int

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes[1] / self.peak_bytes[0]

    @property
    def record(self) -> dict[str, Any]:
        return {**asdict(self), "memory_ratio": self.memory_ratio}

    def __str__(self) -> str:
        delta = self.max_loss_delta
        losses = "not of the same batches" if delta is None else f"differ by {delta:.3g} at most"
        (a_s, b_s), (a, b) = self.step_s, (each / 2**20 for each in self.peak_bytes)
        return (
            f"a step       A {a_s:.4g} s, B {b_s:.4g} s ({self.steps} steps in {self.turns} turns)\n"
            f"speed-up     {self.speedup:.3f} (95 %: {self.low:.3f} to {self.high:.3f})\n"
            f"peak memory  A {a:,.0f} MiB, B {b:,.0f} MiB: {self.memory_ratio:.3f}\n"
            f"losses       {losses}"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What B must reach."""

    min_speedup: float | None = None
    max_memory_ratio: float | None = None
    max_loss_delta: float | None = None

    def broken(self, found: Comparison) -> list[str]:
        """List what B does not reach."""
        said = []
        if self.min_speedup is not None and not found.speedup >= self.min_speedup:
            said.append(f"speed-up {found.speedup:.3f} is below --min-speedup {self.min_speedup:g}")
        if self.max_memory_ratio is not None and not found.memory_ratio <= self.max_memory_ratio:
            said.append(f"memory {found.memory_ratio:.3f} is above --max-memory-ratio {self.max_memory_ratio:g}")
        limit, delta = self.max_loss_delta, found.max_loss_delta
        if limit is not None and (delta is None or not delta <= limit):
            shown = "unknown: the batches differ" if delta is None else f"{delta:.3g}"
            said.append(f"the losses' difference {shown}; --max-loss-delta is {limit:g}")
        return said


def compare_turns(first: Sequence[Turn], second: Sequence[Turn], *, same_batches: bool) -> Comparison:
    """Compare each turn of A with B's of the same steps."""
    speedup, low, high = ratio_interval([turn.seconds for turn in first], [turn.seconds for turn in second])
    deltas = [
        abs(one - other)
        for a, b in zip(first, second, strict=True)
        for one, other in zip(a.losses, b.losses, strict=True)
    ]
    return Comparison(
        speedup=speedup,
        low=low,
        high=high,
        step_s=(step_s(first), step_s(second)),
        peak_bytes=(max(turn.peak_bytes for turn in first), max(turn.peak_bytes for turn in second)),
        max_loss_delta=max(deltas) if same_batches else None,
        steps=sum(len(turn.losses) for turn in first),
        turns=len(first),
    )


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios, pair by pair, and its interval of 95 %."""
    logs = [math.log(one / other) for one, other in zip(numerators, denominators, strict=True)]
    degrees = len(logs) - 1
    if not degrees:
        return math.exp(logs[0]), 0.0, math.inf
    student = STUDENT_95[degrees - 1] if degrees <= len(STUDENT_95) else 1.96 + 2.5 / degrees
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) * student
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


def step_s(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.seconds / len(turn.losses) for turn in turns)
