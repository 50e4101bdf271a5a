"""Kills and disks without room while a run writes: one line, nothing half-written, and a rerun that loses nothing."""

import os
import signal
from pathlib import Path

import pytest

from tests.full_disk import largest_file, make_room, mounted_disk
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, ForkedTrainer, assert_same_run, command
from trainer.cli import main
from trainer.commands.train import train
from trainer.config import TrainConfig
from trainer.run.checkpoint import OPTIMIZER_FILE, PROJECTOR_FILE
from trainer.run.folder import checkpoints_of
from trainer.run.loop import TrainingLoop


@pytest.fixture(scope="module")
def undisturbed(configured_here: MakeConfig) -> TrainConfig:
    config = configured_here(save_every=1, max_steps=6)
    train(config, ALONE)
    return config


def in_one_line(error: str) -> str:
    (line,) = [line for line in error.splitlines() if line.startswith("trainer: ")]
    assert ".partial" not in line
    return line


def die_before_the_projector() -> None:
    TrainingLoop.publish_projector = lambda loop: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def test_a_run_killed_before_its_projector_gives_it_when_rerun(configured, undisturbed, capsys):
    """So does one whose projector is another; a run that is done and whole changes nothing when rerun."""
    config = configured(save_every=1, max_steps=6)
    projector = config.run.folder / PROJECTOR_FILE
    code, _ = ForkedTrainer(command(config), {}, die_before_the_projector).end()
    assert code == -signal.SIGKILL
    assert checkpoints_of(config.run).steps()[-1] == 6
    assert not projector.exists()
    assert main(command(config)) == 0
    assert f"trained 6 steps: {projector}" in capsys.readouterr().out
    assert_same_run(config, undisturbed)
    before = {path: path.stat().st_mtime_ns for path in config.run.folder.rglob("*.*")}
    assert main(command(config)) == 0
    assert "nothing to do: step 6 is done, and 6 are asked for" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in config.run.folder.rglob("*.*")} == before
    projector.write_bytes(b"of an earlier end of this run")
    assert main(command(config)) == 0
    assert_same_run(config, undisturbed)


@pytest.mark.parametrize(
    "file", ["text/*/tokens.npy", *(f"run/checkpoints/*/{name}" for name in (PROJECTOR_FILE, OPTIMIZER_FILE))]
)
def test_a_file_that_does_not_fit_is_named_and_nothing_left(configured, undisturbed, refusal, tmp_path, file):
    config = configured(save_every=1, max_steps=6)
    size = next(undisturbed.run.folder.parent.glob(file)).stat().st_size
    with largest_file(size - 1):
        line = in_one_line(refusal(1, config))
    assert line.startswith(f"trainer: error: File too large: {tmp_path}/")
    named = Path(line.rpartition(": ")[2])
    assert named.relative_to(tmp_path).match(file)
    assert {path.name for path in named.parents[1].iterdir()} <= {".lock"}
    assert main(command(config)) == 0
    assert_same_run(config, undisturbed)


@pytest.mark.parametrize("size", ["8k", "12k", "20k", "96k"])
def test_room_on_a_full_disk_lets_its_run_go_on(configured, undisturbed, refusal, tmp_path, size):
    """Full at TensorBoard's events, at the log, at the first checkpoint, at a later one."""
    with mounted_disk(tmp_path / "disk", size) as disk:
        config = configured("disk/run", save_every=1, max_steps=6)
        line = in_one_line(refusal(1, config))
        assert line.startswith(f"trainer: error: No space left on device: {disk}/run/")
        make_room(disk)
        assert main(command(config)) == 0
        assert_same_run(config, undisturbed)
