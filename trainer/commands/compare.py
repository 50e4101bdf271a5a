"""The command `compare`: two configs, each in a process of its own, take turns on the same batches."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.program.command_line import parse_config
from cache_store.program.output_file import write_output
from trainer.config import TrainConfig
from trainer.insight.comparison import TURNS, WARM_UP, Comparison, Limits, Turn, compare_turns

LEAST_STEPS = 2 * TURNS

MAX_RANKS = 64
"""More are not on one machine."""


def compare(
    first: str, second: str, base: str | None, steps: int, limits: Limits, report: Path | None = None, ranks: int = 1
) -> list[str]:
    """Print how B does against A, each on so many ranks; return which limits it breaks.

    `base` is read before each of them.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks must be in [1, {MAX_RANKS}], got {ranks}")
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, two for each of {TURNS} turns, got {steps}")
    configs = [read_config(path, base) for path in (first, second)]
    for config in configs:
        config.data.refuse_undivided(ranks)
    found = take_turns(configs, steps, ranks)
    broken = limits.broken(found)
    record = {"a": first, "b": second, "base": base, "ranks": ranks, **found.record, "broken": broken}
    print(found, *broken, json.dumps(record), sep="\n")
    if report:
        write_output(report, json.dumps(record, indent=1).encode() + b"\n")
    return broken


def read_config(path: str, base: str | None) -> TrainConfig:
    files = [path] if base is None else [base, path]
    return parse_config(TrainConfig, [word for file in files for word in ("--config", file)])


def take_turns(configs: list[TrainConfig], steps: int, ranks: int) -> Comparison:
    """Open both sides, one after the other: the first may have to tokenise the text of both."""
    turns: list[list[Turn]] = [[] for _ in configs]
    with ExitStack() as stack:
        sides = []
        for config in configs:
            sides.append(stack.enter_context(start_side(config, WARM_UP + steps, ranks)))
            sides[-1].answer()
        for side in sides:
            side.do(WARM_UP)
        for turn in range(TURNS):
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                turns[place].append(side_turn(sides[place].do(steps // TURNS)))
    shown = [side.batches for side in sides]
    return compare_turns(*turns, same_batches=shown[0] == shown[1])


def side_turn(answer: dict[str, Any]) -> Turn:
    return Turn(answer["losses"], answer["seconds"], answer["peak_bytes"])


class Side:
    """One config's processes, a rank each: they are told how many steps to do, and rank 0 answers in lines of JSON."""

    def __init__(self, ranks: "Sequence[subprocess.Popen[str]]") -> None:
        self._ranks = ranks
        self.batches: Any = None
        """What decides the order of samples."""

    def do(self, steps: int) -> dict[str, Any]:
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # its last answer says why
                print(steps, file=rank.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        first = self._ranks[0].stdout
        assert first is not None
        line = first.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a side ended: is memory too small for both?"}
        if "error" in answer:
            raise EncodeOnceError(answer["error"])
        self.batches = answer.get("batches", self.batches)
        return answer


@contextmanager
def start_side(config: TrainConfig, steps: int, ranks: int) -> Iterator[Side]:
    """Start processes that train by `config`, whenever they are told to; they end with the block."""
    command = [sys.executable, "-m", "trainer.commands.side", json.dumps(asdict(config)), str(steps)]
    with ExitStack() as stack:
        started = list["subprocess.Popen[str]"]()
        for environment in environments(ranks):
            output = subprocess.DEVNULL if started else subprocess.PIPE
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield Side(started)


def environments(ranks: int) -> Iterator[dict[str, str] | None]:
    """Tell each rank of a side what torchrun would; a single one is told nothing."""
    if ranks == 1:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        yield {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
