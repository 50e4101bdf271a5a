"""The command `compare`: two configs, each in a process of its own, take turns on the same batches."""

import json
import subprocess
import sys
from collections.abc import Iterator
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


def compare(
    first: str, second: str, base: str | None, steps: int, limits: Limits, report: Path | None = None
) -> list[str]:
    """Print how B does against A; return which limits it breaks. `base` is read before each of them."""
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, two for each of {TURNS} turns, got {steps}")
    configs = [read_config(path, base) for path in (first, second)]
    found = take_turns(configs, steps)
    broken = limits.broken(found)
    record = {"a": first, "b": second, "base": base, **found.record, "broken": broken}
    print(found, *broken, json.dumps(record), sep="\n")
    if report:
        write_output(report, json.dumps(record, indent=1).encode() + b"\n")
    return broken


def read_config(path: str, base: str | None) -> TrainConfig:
    files = [path] if base is None else [base, path]
    return parse_config(TrainConfig, [word for file in files for word in ("--config", file)])


def take_turns(configs: list[TrainConfig], steps: int) -> Comparison:
    """Open both sides, one after the other: the first may have to tokenise the text of both."""
    turns: list[list[Turn]] = [[] for _ in configs]
    with ExitStack() as stack:
        sides = []
        for config in configs:
            sides.append(stack.enter_context(start_side(config, WARM_UP + steps)))
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
    """One config's process: it is told how many steps to do, and answers what came of them, a JSON line each."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.batches: Any = None
        """What decides the order of samples."""

    def do(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last answer says why
            print(steps, file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a side ended: is memory too small for both?"}
        if "error" in answer:
            raise EncodeOnceError(answer["error"])
        self.batches = answer.get("batches", self.batches)
        return answer


@contextmanager
def start_side(config: TrainConfig, steps: int) -> Iterator[Side]:
    """Start a process that trains by `config`, whenever it is told to; it ends with the block."""
    command = [sys.executable, "-m", "trainer.commands.side", json.dumps(asdict(config)), str(steps)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Side(process)
        finally:
            process.kill()
