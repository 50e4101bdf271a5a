"""A run writes whole checkpoints and one log, whatever kills it or fills its disk, and touches no other files."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import save

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.record import canonical_json, sign
from cache_store.storage.local import write_file
from tests.full_disk import largest_file
from tests.named import assert_names
from tests.posix_disk import Disk, lay_out, recorded, without_scratch
from tests.trainer.conftest import MakeConfig
from tests.trainer.models import make_latents, make_projector
from tests.trainer.runs import ForkedTrainer, assert_same_run, command, damages, train_alone
from trainer.cli import main
from trainer.config import OptimConfig, TrainConfig
from trainer.insight.log import open_log
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    TENSOR_FILES,
    CheckpointFolder,
    MustMatch,
    find_checkpoint,
    read_state,
)
from trainer.run.figures import Validation
from trainer.run.folder import CHECKPOINTS, CONFIG_FILE, checkpoints_of
from trainer.run.update import make_optimizer, parameter_groups
from trainer.train import TrainingRun

pytestmark = pytest.mark.usefixtures("threads_as_in_a_child")


def save_steps(root: Path, *steps: int, keep_last: int = 3) -> CheckpointFolder:
    folder, projector = CheckpointFolder(root, keep_last), make_projector()
    optimizer = make_optimizer(parameter_groups([("world", projector)]), OptimConfig())
    projector(make_latents(4)).square().mean().backward()
    optimizer.step()
    must_match = MustMatch(towers=("world",), samples={}, model={}, text={}, caches={}, order={"data.seed": "0"})
    for step in steps:
        folder.save(step, 8 * step, save(projector.state_dict()), optimizer, must_match, {"optim": {"lr": 1e-4}})
    return folder


def test_the_last_few_and_a_persons_copy_are_kept_and_no_scratch(tmp_path):
    shutil.copytree(save_steps(tmp_path, 5).path(5), tmp_path / "step-00000005-best")
    for killed in (".step-00000005.1.partial", ".step-00000003.1.partial"):
        (tmp_path / killed).mkdir()
    folder = save_steps(tmp_path, 10, 15, 20, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-000000{kept}" for kept in ("05-best", "15", "20")}
    state = read_state(folder.path(20))
    assert (folder.steps(), state.step, state.position) == ([15, 20], 20, 160)


def test_a_power_cut_leaves_the_newest_checkpoint_or_the_one_before_and_no_broken_one(tmp_path):
    """What a save returned for is there."""
    (root := tmp_path / "run").mkdir()
    folder, ends = CheckpointFolder(root / CHECKPOINTS, 2), {0: 0}
    with recorded(root, Disk()) as moments:
        write_file(root / CONFIG_FILE, b"")
        for step in (5, 10, 15):
            save_steps(root / CHECKPOINTS, step, keep_last=2)
            ends[len(moments) - 1] = step
    tried = set()
    for number, disk in enumerate(moments):
        saved = ends[max(end for end in ends if end <= number)]
        for state in disk.after_a_power_cut():
            if (key := (saved, frozenset(without_scratch(state).items()))) not in tried:
                tried.add(key)
                lay_out(root, state)
                found = find_checkpoint(folder)
                assert saved <= (found[1].step if found else 0)
                assert [read_state(folder.path(step)).step for step in folder.steps()] == folder.steps()
    assert len(tried) >= 10


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    saved = save_steps(tmp_path, 5).path(5)
    for name in (*TENSOR_FILES, STATE_FILE):
        for _ in damages(saved / name):
            with pytest.raises((CacheError, ConfigError), match=name):
                read_state(saved)
    state = read_state(saved)
    secret = {"../../secret": "0", TENSOR_FILES[1]: "0"}
    for changes, error in (({"format_version": 99}, NewerFormatError), ({"files": secret}, CacheError)):
        (saved / STATE_FILE).write_bytes(canonical_json(sign(replace(state, **changes))))
        with pytest.raises(error, match=f"{re.escape(str(saved))}.*({STATE_FILE}|{PROJECTOR_FILE})"):
            read_state(saved)


def test_resume_takes_the_newest_checkpoint_by_its_own_step(tmp_path):
    folder = save_steps(tmp_path / "run", 5, 10)
    assert find_checkpoint(folder)[0] == folder.path(10)
    folder.path(10).rename(folder.path(15))
    with pytest.raises(CacheError, match="step-00000015.* 10"):
        find_checkpoint(folder)


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.tex", ""),
        ("config.yaml", "cache: /home/.cache\nlearning_rate: 1\n"),
        ("checkpoints/last.ckpt", ""),
    ],
)
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(configured, refusal, tmp_path, name, text):
    """A run's text may lie there: it does not count as another file."""
    run = tmp_path / "run"
    fill(run, {name: text, "made/text/.claim": ""})
    refusal(2, configured(text_dir=str(run / "made" / "text")), names=f"run.output: {run} {name.partition('/')[0]}")
    assert {path for path in run.rglob("*") if path.is_file()} == {run / name, run / "made/text/.claim"}


def write_steps(config: TrainConfig, completed: int, last: int) -> list[Any]:
    """Log the steps after `completed`; return all steps in the log."""
    config.run.folder.mkdir(exist_ok=True)
    with open_log(config, completed, last) as log_step:
        for step in range(completed + 1, last + 1):
            log_step(step, {"step": step, "loss": 1.5, "samples_per_s": 1.0}, Validation(), ())
    return [json.loads(line)["step"] for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]


def test_log_and_tensorboard_hold_each_step_once_after_a_resume(configured):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(config := configured(), 0, 7)
    assert write_steps(config, 4, 6) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(config.run.folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, 1.5) for step in range(1, 7)]


def test_a_line_that_is_no_record_is_dropped_and_the_others_stay(configured):
    write_steps(config := configured(report_to=[]), 0, 3)
    path = config.run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    for broken in (b'{"step": 4, "lo', b"[1]", b'{"step": 2, "\xff": 1}'):
        path.write_bytes(broken + b"\n" + whole + broken)
        assert write_steps(config, 3, 4) == [1, 2, 3, 4]
    assert not (config.run.folder / "tensorboard").exists(), "no tracker was asked for"


@pytest.fixture(scope="module")
def undisturbed(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here(save_every=1, max_steps=6))


def die_before_the_projector() -> None:
    TrainingRun.publish_projector = lambda loop: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def test_a_run_killed_before_its_projector_gives_it_when_rerun(configured, undisturbed, capsys):
    """A complete run changes nothing when rerun."""
    config = configured(save_every=1, max_steps=6)
    projector = config.run.folder / PROJECTOR_FILE
    code, _ = ForkedTrainer(command(config), {}, die_before_the_projector).end()
    assert (code, checkpoints_of(config.run).steps()[-1], projector.exists()) == (-signal.SIGKILL, 6, False)
    assert main(command(config)) == 0
    assert_names(capsys.readouterr().out, f"6 {projector}")
    assert_same_run(config, undisturbed)
    before = {path: path.stat().st_mtime_ns for path in config.run.folder.rglob("*.*")}
    assert main(command(config)) == 0
    assert {path: path.stat().st_mtime_ns for path in config.run.folder.rglob("*.*")} == before


@pytest.mark.parametrize("file", ["text/*/tokens", f"run/checkpoints/*/{OPTIMIZER_FILE}"])
def test_a_file_that_does_not_fit_is_named_and_nothing_left(configured, undisturbed, refusal, tmp_path, file):
    config = configured(save_every=1, max_steps=6)
    size = next(undisturbed.run.folder.parent.glob(file)).stat().st_size
    with largest_file(size - 16):  # the first checkpoint is smaller, since it names fewer samples
        (line,) = [line for line in refusal(1, config).splitlines() if line.startswith("trainer: ")]
    named = Path(line.rpartition(": ")[2])
    assert named.relative_to(tmp_path).match(file)
    assert not [*named.parents[1].glob("*")]
    assert main(command(config)) == 0
    assert_same_run(config, undisturbed)
