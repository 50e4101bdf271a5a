"""Small training runs: their configs and figures, in this process and in processes of their own."""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cache_store import open_joined
from cache_store.errors import Interrupted
from cache_store.program.config_file import config_fields
from tests.forked import FORKED
from trainer.cli import main
from trainer.config import DataConfig, OptimConfig, TrainConfig, TrainRunConfig
from trainer.model.model_config import ModelConfig
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.figures import Captioner
from trainer.run.folder import checkpoints_of
from trainer.run.parallel import World
from trainer.run.session import Session
from trainer.train import TrainingRun, train

PATIENCE_S = 300
"""Longest wait for a process: only one that hangs takes so long."""
Caches = Mapping[str, str]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def make_config(
    home: Path,
    name: Path | str = "run",
    *,
    cache: Path | Caches | list[Any],
    language_model: Path | str,
    **changes: Any,
) -> TrainConfig:
    """Make the config of twelve steps of 8 of about 30 samples; `changes` go to the section that has the field.

    `cache` may be a mapping of each tower's cache, or a list of views.
    """
    sections = {
        "model": ModelConfig(language_model=str(language_model)),
        "data": DataConfig(max_text_tokens=64, val_fraction=0.2, text_dir=str(home / "text")),
        "optim": OptimConfig(lr=1e-3),
        "run": TrainRunConfig(
            output=str(home / name), epochs=3, precision="fp32", save_every=5, eval_every=5, sample_captions=0
        ),
    }
    for key, section in sections.items():
        own = {field.name for field in fields(section)} & set(changes)
        sections[key] = replace(section, **{field: changes.pop(field) for field in own})
    assert not changes
    named = {"caches": dict(cache)} if isinstance(cache, Mapping) else {"cache": str(cache)}
    if isinstance(cache, list):
        named, sections["data"] = {}, replace(sections["data"], views=cache)
    return TrainConfig(**named, **sections)


def command(config: TrainConfig, name: str = "train") -> list[str]:
    """Return the command line of a config: texts as they are, other values as JSON, which is YAML too."""
    known = {field.name for field in config_fields(TrainConfig)}

    def words_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            if (field := prefix + key) in known:
                yield f"--{field}={value if isinstance(value, str) else json.dumps(value)}"
            else:
                yield from words_of(value, f"{field}.")

    return [name, *words_of(asdict(config))]


def named_fields(error: str) -> set[str]:
    """Return the first column of the table in a message."""
    rows = [line.strip().split("  ") for line in error.splitlines() if line.startswith("  ")]
    return {row[0] for row in rows if len(row) > 1} - {"field"}


def metrics(output: Path, key: str = "loss") -> dict[int, Any]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same_run(config: TrainConfig, other: TrainConfig) -> None:
    """Assert that all figures of both logs and both projectors are equal, bit for bit."""
    for key in ("loss", "grad_norm", "val_loss", "val_loss_shuffled", "val_accuracy"):
        assert metrics(config.run.folder, key) == metrics(other.run.folder, key)
    assert (config.run.folder / PROJECTOR_FILE).read_bytes() == (other.run.folder / PROJECTOR_FILE).read_bytes()


def assert_near_run(config: TrainConfig, other: TrainConfig, *keys: str) -> None:
    """Assert that the logs' figures, by default the losses, differ by rounding alone."""
    for key in keys or ("loss",):
        assert metrics(config.run.folder, key) == pytest.approx(metrics(other.run.folder, key), rel=1e-4)


def train_from(before: TrainConfig, step: int, config: TrainConfig) -> TrainConfig:
    """Train a run that begins with a copy of another's checkpoint; return its config."""
    shutil.copytree(checkpoints_of(before.run).path(step), checkpoints_of(config.run).path(step))
    return train_alone(config)


def damages(path: Path) -> Iterator[None]:
    """Flip one bit of the file, 60 times another; cut the file short; delete it. Make it whole at the end."""
    sound = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(sound), 60).tolist():
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        yield
    path.write_bytes(sound[:-3])
    yield
    path.unlink()
    yield
    path.write_bytes(sound)


def watched(config: TrainConfig, at_read: Callable[[int, np.ndarray], None]) -> SimpleNamespace:
    """Open the caches; `at_read(count, latents)` is called at each read: one calibrates, then each step reads once."""
    cache, reads = open_joined(config.towers), count(1)

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        samples = cache.read(numbers)
        at_read(next(reads), samples["world"])
        return samples

    return SimpleNamespace(read=read)


def train_alone(config: TrainConfig, source: Any = None) -> TrainConfig:
    """Train in this process, with no other rank; return the config."""
    train(config, ALONE, source)
    return config


def train_until(config: TrainConfig, stop: int) -> None:
    """Train until a signal comes during read number `stop`, counted as `watched` does."""
    source = watched(config, lambda read, _: read == stop and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="run the same command to go on"):
        train_alone(config, source)


def open_alone(config: TrainConfig) -> Session:
    return Session(config, ALONE).prepare()


def make_loop(session: Session, captioner: Captioner | None = None) -> TrainingRun:
    return TrainingRun(session, checkpoints_of(session.config.run), captioner)


def meeting_of_two() -> dict[str, str]:
    """Return the environment in which torchrun tells two ranks where to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}


Prepare = Callable[[], None] | None


class ForkedTrainer:
    """The trainer in a process of its own, which calls `prepare` first."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], prepare: Prepare = None) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as stream:
            self.errors = Path(stream.name)
        given = arguments, dict(environment), self.errors, prepare
        self.process = FORKED.Process(target=run_forked, args=given, daemon=True)
        self.process.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.is_alive(), self.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def until_it_says(self, words: str) -> None:
        self.until(lambda: words in self.errors.read_text())

    def end(self) -> tuple[int | None, str]:
        """Return its exit code and its standard error; a process that hangs is killed."""
        self.process.join(PATIENCE_S)
        self.process.kill()
        self.process.join()
        errors = self.errors.read_text()
        self.errors.unlink()
        return self.process.exitcode, errors


def run_forked(arguments: Sequence[str], environment: Mapping[str, str], errors: Path, prepare: Prepare) -> None:
    os.environ |= environment
    with errors.open("w") as stream, Path(os.devnull).open("w") as nowhere:
        os.dup2(stream.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
    if prepare is not None:
        prepare()
    sys.exit(main(arguments))


def fork_ranks(config: TrainConfig, *prepare: Prepare, **environment: str) -> list[ForkedTrainer]:
    meeting = {**meeting_of_two(), **environment}
    return [fork_rank(config, rank, meeting, each) for rank, each in enumerate(prepare or (None, None))]


def fork_rank(config: TrainConfig, rank: int, meeting: Mapping[str, str], prepare: Prepare = None) -> ForkedTrainer:
    return ForkedTrainer(command(config), {**meeting, "RANK": str(rank), "LOCAL_RANK": "0"}, prepare)


def train_on_two_ranks(config: TrainConfig, *prepare: Prepare) -> TrainConfig:
    """Train on two ranks, each in a process of its own; return the config."""
    end_well(*fork_ranks(config, *prepare))
    return config


def end_well(*ranks: ForkedTrainer) -> None:
    for code, error in [rank.end() for rank in ranks]:
        assert code == 0, error
