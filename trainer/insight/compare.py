"""The command `compare`: two configs, each in processes of its own, take turns on the same batches."""

import json
import math
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.program.command_line import parse_config
from cache_store.program.output_file import write_output
from cache_store.program.running import hold_stop_signals
from trainer.config import TrainConfig

WARM_UP = 3
"""Steps of each side before the first turn."""

TURNS = 5
"""Turns of each side: a slow machine then slows both alike."""

LEAST_STEPS = 2 * TURNS

MAX_RANKS = 64
"""One machine has no more GPUs."""

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for an interval of 95 %, by degrees of freedom from 1 on; beyond them 1.96 + 2.5 / degrees is as near."""


@dataclass(frozen=True)
class Turn:
    """Some steps of one side."""

    losses: Sequence[float]
    seconds: float
    peak_bytes: int
    gpu_use: Sequence[float] = ()
    """Readings of the share of time in which rank 0's GPU was busy, one a second."""
    nonfinite: int = 0
    """Steps from the start, those of the warm-up too, with a loss or norm at which `train` would stop."""

    @property
    def record(self) -> dict[str, Any]:
        """Return the figures as JSON has them, where a loss that is not finite is null."""
        return {**asdict(self), "losses": [loss if math.isfinite(loss) else None for loss in self.losses]}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B compared with A."""

    speedup: float
    """Speed of B's steps as a multiple of A's: the geometric mean over turns."""
    low: float
    high: float
    """Interval of 95 % of the speed-up."""
    step_s: tuple[float, float]
    """Medians over turns, of A and B."""
    peak_bytes: tuple[int, int]
    gpu_use: tuple[float | None, float | None]
    """Mean share of time in which the GPU was busy; None without a GPU, or if all turns are shorter than a second."""
    same_batches: bool
    max_loss_delta: float | None
    """The largest difference between the losses of one step; None if the sides see different batches, or if no step has
    a finite loss on both sides."""
    nonfinite: tuple[int, int]
    """Steps of A and B, the warm-up's too, whose loss, gradient norm or parameter norm is not finite."""
    steps: int
    turns: int

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes[1] / self.peak_bytes[0]

    @property
    def record(self) -> dict[str, Any]:
        return {**asdict(self), "memory_ratio": self.memory_ratio}

    @property
    def diverged(self) -> list[str]:
        """Name the sides with a step that is not finite."""
        counts, steps = zip("AB", self.nonfinite, strict=True), WARM_UP + self.steps
        return [
            f"{side}: in {count} of {steps} steps, loss, gradient norm or parameter norm is not finite"
            for side, count in counts
            if count
        ]

    def __str__(self) -> str:
        delta = self.max_loss_delta
        unknown = "none finite on both sides" if self.same_batches else "not of the same batches"
        losses = unknown if delta is None else f"differ by {delta:.3g} at most"
        (a_s, b_s), (a, b) = self.step_s, (each / 2**20 for each in self.peak_bytes)
        used = ["not measured" if each is None else f"{each:.0%}" for each in self.gpu_use]
        gpu_use = "" if self.gpu_use == (None, None) else f"GPU use      A {used[0]}, B {used[1]}\n"
        return (
            f"a step       A {a_s:.4g} s, B {b_s:.4g} s ({self.steps} steps in {self.turns} turns)\n"
            f"speed-up     {self.speedup:.3f} (95 %: {self.low:.3f} to {self.high:.3f})\n"
            f"peak memory  A {a:,.0f} MiB, B {b:,.0f} MiB: {self.memory_ratio:.3f}\n"
            f"{gpu_use}"
            f"losses       {losses}"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that B must keep."""

    min_speedup: float | None = None
    max_memory_ratio: float | None = None
    max_loss_delta: float | None = None

    def broken(self, found: Comparison) -> list[str]:
        """List the limits that B breaks, with its figures."""
        broken = []
        if self.min_speedup is not None and not found.speedup >= self.min_speedup:
            broken.append(f"speed-up {found.speedup:.3f} is below --min-speedup {self.min_speedup:g}")
        if self.max_memory_ratio is not None and not found.memory_ratio <= self.max_memory_ratio:
            broken.append(f"memory {found.memory_ratio:.3f} is above --max-memory-ratio {self.max_memory_ratio:g}")
        limit, delta = self.max_loss_delta, found.max_loss_delta
        if limit is not None and (delta is None or not delta <= limit):
            shown = "unknown" if delta is None else f"{delta:.3g}"
            broken.append(f"the losses' difference {shown}; --max-loss-delta is {limit:g}")
        return broken


def compare(
    first: str, second: str, base: str | None, steps: int, limits: Limits, report: Path | None = None, ranks: int = 1
) -> list[str]:
    """Print how B compares with A, each on `ranks` processes; return the limits that it breaks, and sides that diverge.

    Both configs are read over `base`. The report has each turn's figures too.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks must be in [1, {MAX_RANKS}], got {ranks}")
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, two for each of {TURNS} turns, got {steps}")
    configs = [read_config(path, base) for path in (first, second)]
    for config in configs:
        config.data.refuse_undivided(ranks)
    turns, found = take_turns(configs, steps, ranks)
    broken = [*found.diverged, *limits.broken(found)]
    record = {"a": first, "b": second, "base": base, "ranks": ranks, **found.record, "broken": broken}
    print(found, *broken, json.dumps(record, allow_nan=False), sep="\n")
    if report:
        record["every_turn"] = {
            side: [each.record for each in of_side] for side, of_side in zip("ab", turns, strict=True)
        }
        write_output(report, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")
    return broken


def read_config(path: str, base: str | None) -> TrainConfig:
    files = [path] if base is None else [base, path]
    return parse_config(TrainConfig, [word for file in files for word in ("--config", file)])


def take_turns(configs: Sequence[TrainConfig], steps: int, ranks: int) -> tuple[list[list[Turn]], Comparison]:
    """Open both sides, one after the other: the first may tokenise the text of both. Then let them take turns.

    Return each side's turns, and what they say.
    """
    turns: list[list[Turn]] = [[] for _ in configs]
    with ExitStack() as stack:
        sides, openings = list[Side](), list[dict[str, Any]]()
        for config in configs:
            sides.append(stack.enter_context(start_side(config, WARM_UP + steps, ranks)))
            openings.append(sides[-1].answer())
        print_announcements(*(each["announced"] for each in openings))
        for side in sides:
            side.run(WARM_UP)
        for turn in range(TURNS):
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                turns[place].append(sides[place].run(steps // TURNS))
    return turns, compare_turns(*turns, same_batches=openings[0]["batches"] == openings[1]["batches"])


def print_announcements(first: Sequence[str], second: Sequence[str]) -> None:
    """Print what the sides announced, on standard error: lines of both once, others under their side's letter."""
    lines = [line if line in second else f"A: {line}" for line in first]
    lines += [f"B: {line}" for line in second if line not in first]
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def compare_turns(first: Sequence[Turn], second: Sequence[Turn], *, same_batches: bool) -> Comparison:
    """Compare each turn of A with B's turn of the same steps."""
    speedup, low, high = ratio_interval([turn.seconds for turn in first], [turn.seconds for turn in second])
    losses = [[loss for turn in side for loss in turn.losses] for side in (first, second)]
    finite = [pair for pair in zip(*losses, strict=True) if all(map(math.isfinite, pair))]
    return Comparison(
        speedup=speedup,
        low=low,
        high=high,
        step_s=(step_s(first), step_s(second)),
        peak_bytes=(max(turn.peak_bytes for turn in first), max(turn.peak_bytes for turn in second)),
        gpu_use=(mean_gpu_use(first), mean_gpu_use(second)),
        same_batches=same_batches,
        max_loss_delta=max((abs(a - b) for a, b in finite), default=None) if same_batches else None,
        nonfinite=(first[-1].nonfinite, second[-1].nonfinite),
        steps=len(losses[0]),
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


def mean_gpu_use(turns: Sequence[Turn]) -> float | None:
    readings = [reading for turn in turns for reading in turn.gpu_use]
    return statistics.fmean(readings) if readings else None


class Side:
    """One config's processes, a rank each; they are told how many steps to do, and rank 0 answers in lines of JSON."""

    def __init__(self, ranks: "Sequence[subprocess.Popen[str]]") -> None:
        self.ranks = ranks

    def run(self, steps: int) -> Turn:
        for rank in self.ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # the rank's last answer says why
                print(steps, file=rank.stdin, flush=True)
        return Turn(**self.answer())

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer: the first when the side is open, then one a turn."""
        first = self.ranks[0].stdout
        assert first is not None
        line = first.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a side ended: is memory too small for both?"}
        if "error" in answer:
            raise EncodeOnceError(answer["error"])
        return answer


@contextmanager
def start_side(config: TrainConfig, steps: int, ranks: int) -> Iterator[Side]:
    """Start processes that train by `config` when told to; they end with the block, and no signal stops them before."""
    command = [sys.executable, "-m", "trainer.insight.compare_side", json.dumps(asdict(config)), str(steps)]
    with ExitStack() as stack:
        started = list["subprocess.Popen[str]"]()
        for environment in environments(ranks):
            output = subprocess.DEVNULL if started else subprocess.PIPE
            with hold_stop_signals():
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield Side(started)


def environments(ranks: int) -> Iterator[dict[str, str] | None]:
    """Yield each rank's environment as torchrun would set it; None for a single rank."""
    if ranks == 1:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        yield {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
