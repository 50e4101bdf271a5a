"""The command `compare`: two configs, each in processes of its own, take turns on the same batches."""

import io
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.program.command_line import parse_config
from cache_store.program.gpu_use import GpuMeter
from cache_store.program.running import hold_stop_signals, ignore_stop_signals
from trainer.config import TrainConfig
from trainer.data.prefetch import prefetched
from trainer.run.memory import fit_memory, gpu_uuid, peak_memory_bytes
from trainer.run.parallel import World, join_world
from trainer.run.session import Session
from trainer.run.update import Updater

WARM_UP = 3
"""Steps of each side before the first turn."""

TURNS = 5
"""Turns of each side: a slow machine then slows both alike."""

STUDENT_95 = (12.71, 4.30, 3.18, 2.78)
"""Student's t for 95 %, by degrees of freedom from 1 on; beyond these, 1.96 + 2.5 / degrees is near."""


@dataclass(frozen=True)
class Turn:
    """Some steps of one side."""

    losses: Sequence[float | None]
    """A loss that is not finite is None."""
    seconds: float
    peak_bytes: int
    gpu_use: Sequence[float] = ()
    """How busy rank 0's GPU was, one reading a second."""
    nonfinite: int = 0
    """Steps so far, warm-up included, with a loss or norm at which `train` would stop."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B compared with A; pairs are (A's, B's)."""

    speedup: float
    """Geometric mean over turns."""
    low: float
    high: float
    """The 95 % interval of the speed-up."""
    step_s: tuple[float, float]
    """Medians over turns."""
    peak_bytes: tuple[int, int]
    memory_ratio: float
    gpu_use: tuple[float | None, float | None]
    """Mean; None without a GPU, or if all turns are shorter than a second."""
    same_batches: bool
    max_loss_delta: float | None
    """Largest difference at one step; None for different batches, or if no step is finite on both sides."""
    nonfinite: tuple[int, int]
    steps: int

    def __str__(self) -> str:
        delta, unknown = self.max_loss_delta, "none finite on both sides" if self.same_batches else "other batches"
        a, b = (each / 2**20 for each in self.peak_bytes)
        lines = [
            f"a step       A {self.step_s[0]:.4g} s, B {self.step_s[1]:.4g} s ({self.steps} steps in {TURNS} turns)",
            f"speed-up     {self.speedup:.3f} (95 %: {self.low:.3f} to {self.high:.3f})",
            f"peak memory  A {a:,.0f} MiB, B {b:,.0f} MiB: {self.memory_ratio:.3f}",
        ]
        if self.gpu_use != (None, None):
            used = ["not measured" if each is None else f"{each:.0%}" for each in self.gpu_use]
            lines.append(f"GPU use      A {used[0]}, B {used[1]}")
        return "\n".join([*lines, f"losses       {unknown if delta is None else f'differ by {delta:.3g} at most'}"])


def broken_limits(
    found: Comparison,
    min_speedup: float = 0.0,
    max_memory_ratio: float = math.inf,
    max_loss_delta: float = math.inf,
) -> list[str]:
    """List sides with steps that are not finite, and limits that B breaks."""
    broken = [
        f"{side}: in {count} of {WARM_UP + found.steps} steps, loss, gradient norm or parameter norm is not finite"
        for side, count in zip("AB", found.nonfinite, strict=True)
        if count
    ]
    if not found.speedup >= min_speedup:
        broken.append(f"speed-up {found.speedup:.3f} is below --min-speedup {min_speedup:g}")
    if not found.memory_ratio <= max_memory_ratio:
        broken.append(f"memory {found.memory_ratio:.3f} is above --max-memory-ratio {max_memory_ratio:g}")
    delta = math.nan if found.max_loss_delta is None else found.max_loss_delta
    if max_loss_delta < math.inf and not delta <= max_loss_delta:
        broken.append(f"the losses' difference is {delta:.3g}; --max-loss-delta is {max_loss_delta:g}")
    return broken


def compare(
    first: str,
    second: str,
    base: str | None,
    steps: int,
    limits: Mapping[str, float],
    ranks: int = 1,
) -> list[str]:
    """Print how B compares with A, both read over `base`; return the broken limits."""
    if ranks < 1:
        raise ConfigError("--ranks must be at least 1")
    if steps < 2 * TURNS:
        raise ConfigError(f"--steps must be at least {2 * TURNS}, two for each of {TURNS} turns, got {steps}")
    options = [config_options(path, base) for path in (first, second)]
    for each in options:
        parse_config(TrainConfig, each).data.refuse_undivided(ranks)
    found = take_turns(options, steps, ranks)
    broken = broken_limits(found, **limits)
    record = {"a": first, "b": second, "base": base, "ranks": ranks, **asdict(found), "broken": broken}
    print(found, *broken, json.dumps(record, allow_nan=False), sep="\n")
    return broken


def config_options(path: str, base: str | None) -> list[str]:
    return [word for file in (base, path) if file is not None for word in ("--config", file)]


def take_turns(sides: Sequence[Sequence[str]], steps: int, ranks: int) -> Comparison:
    """Open both sides, let them take turns, and compare these."""
    turns: list[list[Turn]] = [[] for _ in sides]
    with ExitStack() as stack:
        started, openings = list[list[Connection]](), list[dict[str, Any]]()
        for options in sides:  # one after the other: the first may tokenise the text of both
            started.append(stack.enter_context(start_ranks(options, WARM_UP + steps, ranks)))
            openings.append(answer_of(started[-1][0]))
        first, second = (each["announced"] for each in openings)
        lines = [line if line in second else f"A: {line}" for line in first]
        print(*lines, *(f"B: {line}" for line in second if line not in first), sep="\n", file=sys.stderr, flush=True)
        for side in started:
            do_steps(side, WARM_UP)
        for turn in range(TURNS):
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                turns[place].append(do_steps(started[place], steps // TURNS))
    return compare_turns(*turns, same_batches=openings[0]["batches"] == openings[1]["batches"])


def compare_turns(first: Sequence[Turn], second: Sequence[Turn], *, same_batches: bool) -> Comparison:
    sides = (first, second)
    speedup, low, high = ratio_interval(*([turn.seconds for turn in side] for side in sides))
    losses = [[loss for turn in side for loss in turn.losses] for side in sides]
    deltas = [abs(a - b) for a, b in zip(*losses, strict=True) if a is not None and b is not None]
    a_s, b_s = (statistics.median(turn.seconds / len(turn.losses) for turn in side) for side in sides)
    a_bytes, b_bytes = (max(turn.peak_bytes for turn in side) for side in sides)
    a_use, b_use = ([reading for turn in side for reading in turn.gpu_use] for side in sides)
    return Comparison(
        speedup=speedup,
        low=low,
        high=high,
        step_s=(a_s, b_s),
        peak_bytes=(a_bytes, b_bytes),
        memory_ratio=b_bytes / a_bytes,
        gpu_use=(statistics.fmean(a_use) if a_use else None, statistics.fmean(b_use) if b_use else None),
        same_batches=same_batches,
        max_loss_delta=max(deltas, default=None) if same_batches else None,
        nonfinite=(first[-1].nonfinite, second[-1].nonfinite),
        steps=len(losses[0]),
    )


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of two or more ratios, pair by pair, and its 95 % interval."""
    logs = [math.log(one / other) for one, other in zip(numerators, denominators, strict=True)]
    degrees = len(logs) - 1
    student = STUDENT_95[degrees - 1] if degrees <= len(STUDENT_95) else 1.96 + 2.5 / degrees
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) * student
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


@contextmanager
def start_ranks(options: Sequence[str], steps: int, ranks: int) -> Iterator[list[Connection]]:
    """Start processes that train when told to, as under torchrun; no signal stops them before the block ends."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # spawning would start it in the block below, and that lets signals through
    with socket.create_server(("127.0.0.1", 0)) as probe:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        pipes = list[Connection]()
        for rank in range(ranks):
            place = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(options, steps, place, theirs))
            with hold_stop_signals():
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()  # so that our end closes when the process ends
            pipes.append(stack.enter_context(ours))
        yield pipes


def run_rank(options: Sequence[str], steps: int, place: Mapping[str, str], pipe: Connection) -> None:
    """Do as many steps at a time as the pipe says; send rank 0's answers, and any rank's error."""
    ignore_stop_signals()
    os.environ |= place
    os.dup2(2, 1)  # standard output is the comparison's
    try:
        with join_world() as world, suppress(EOFError, BrokenPipeError):  # the comparing process ended
            for answer in answer_each(parse_config(TrainConfig, options), steps, world, iter(pipe.recv, None)):
                if world.is_main:
                    pipe.send(answer)
    except EncodeOnceError as error:
        pipe.send(str(error))


def answer_each(config: TrainConfig, steps: int, world: World, asked: Iterable[int]) -> Iterator[dict[str, Any] | Turn]:
    """Yield what the session announces; then do `asked` many of the run's first steps, and yield the turn."""
    with redirect_stdout(io.StringIO()) as announced:
        session = Session(replace(config, run=replace(config.run, max_steps=steps)), world).prepare()
        fit_memory(session)
    decided_by = {section: getattr(session.must_match, section) for section in ("caches", "text", "order")}
    yield {"announced": announced.getvalue().splitlines(), "batches": decided_by}
    total = config.run.total_steps(len(session.split.train), config.data.batch_size)
    updater, done, nonfinite = Updater(session, max(steps, total)), 0, 0
    with closing(prefetched(session.loader, range(steps), session.loader.threads)) as batches:
        for count in asked:
            with closing(GpuMeter(gpu_uuid(world.device))) as meter:
                losses, began = list[float | None](), time.perf_counter()
                for _ in range(count):
                    update = updater(next(batches), done)
                    loss = update.metrics["loss"]
                    losses.append(loss if math.isfinite(loss) else None)
                    nonfinite += not update.is_finite
                    done += 1
                seconds, gpu_use = time.perf_counter() - began, meter.take()
            yield Turn(losses, seconds, peak_memory_bytes(world.device), gpu_use, nonfinite)


def do_steps(ranks: Sequence[Connection], steps: int) -> Turn:
    for rank in ranks:
        with suppress(OSError):  # the rank's last answer says why
            rank.send(steps)
    turn: Turn = answer_of(ranks[0])
    return turn


def answer_of(rank: Connection) -> Any:
    """Wait for the next answer: the first when the side is open, then one a turn."""
    try:
        answer = rank.recv()
    except (EOFError, OSError):
        answer = "a side ended: is memory too small for both?"
    if isinstance(answer, str):
        raise EncodeOnceError(answer)
    return answer
