"""Kills and disks without room while a run writes: one line, nothing half-written, and a rerun that loses nothing."""

import os
import re
import signal

import pytest

from tests.full_disk import largest_file, make_room, mounted_disk
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, ForkedTrainer, assert_same_run, command, projector_bytes
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
    return line


def die_before_the_projector() -> None:
    TrainingLoop.publish_projector = lambda loop: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def test_a_run_killed_before_its_projector_gives_it_when_rerun(configured, undisturbed, capsys):
    config = configured(save_every=1, max_steps=6)
    code, _ = ForkedTrainer(command(config), {}, die_before_the_projector).end()
    assert code == -signal.SIGKILL
    assert checkpoints_of(config.run).steps()[-1] == 6
    assert not (config.run.folder / PROJECTOR_FILE).exists()
    assert main(command(config)) == 0
    assert f"trained 6 steps: {config.run.folder}/projector.safetensors" in capsys.readouterr().out
    assert_same_run(config, undisturbed)


def test_a_finished_run_changes_nothing_but_a_wrong_projector(undisturbed, capsys):
    whole = projector_bytes(undisturbed)
    (undisturbed.run.folder / PROJECTOR_FILE).write_bytes(b"of an earlier end of this run")
    train(undisturbed, ALONE)
    assert projector_bytes(undisturbed) == whole
    before = {path: path.stat().st_mtime_ns for path in undisturbed.run.folder.rglob("*.*")}
    train(undisturbed, ALONE)
    assert {path: path.stat().st_mtime_ns for path in undisturbed.run.folder.rglob("*.*")} == before
    assert "nothing to do: step 6 is done, and 6 are asked for" in capsys.readouterr().out


@pytest.mark.parametrize("name", [PROJECTOR_FILE, OPTIMIZER_FILE])
def test_a_checkpoint_that_does_not_fit_leaves_nothing(configured, undisturbed, refusal, name):
    size = (checkpoints_of(undisturbed.run).path(6) / name).stat().st_size
    config = configured(save_every=1, max_steps=6)
    with largest_file(size - 1):
        line = in_one_line(refusal(1, config))
    assert line == f"trainer: error: File too large: {config.run.folder}/checkpoints/step-00000001/{name}"
    assert list((config.run.folder / "checkpoints").iterdir()) == []
    assert main(command(config)) == 0
    assert_same_run(config, undisturbed)


@pytest.mark.parametrize(
    ("name", "size"), [("run", "8k"), ("run", "12k"), ("run", "20k"), ("run", "96k"), ("text", "16k")]
)
def test_room_on_a_full_disk_lets_its_run_go_on(configured, undisturbed, refusal, tmp_path, name, size):
    """Full at TensorBoard's events, at the log, at the first checkpoint, at a later one; at the tokenised text."""
    with mounted_disk(tmp_path / "disk", size) as disk:
        place = {"run": tmp_path / "run", "text": tmp_path / "text", name: disk / name}
        config = configured(place["run"], save_every=1, max_steps=6, text_dir=str(place["text"]))
        line = in_one_line(refusal(1, config))
        assert line.startswith(f"trainer: error: No space left on device: {disk}/{name}/")
        assert ".partial" not in line
        if name == "text":
            assert list(place["text"].iterdir()) == [place["text"] / ".lock"]
        make_room(disk)
        assert main(command(config)) == 0
        assert_same_run(config, undisturbed)


def test_text_that_does_not_fit_names_its_file(configured, refusal, tmp_path):
    config = configured(max_steps=1)
    with largest_file(1_000):
        line = in_one_line(refusal(1, config))
    assert re.fullmatch(rf"trainer: error: File too large: {tmp_path}/text/[0-9a-f]{{32}}/tokens.npy", line)
    assert list((tmp_path / "text").iterdir()) == [tmp_path / "text/.lock"]
