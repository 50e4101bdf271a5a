"""What a run keeps in its output folder: whole checkpoints, one log, and nobody else's files."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.record import canonical_json, signed
from tests.trainer.model.test_model import make_latents, make_projector
from tests.trainer.runs import FORKED
from trainer.config import OptimConfig
from trainer.run.checkpoint import TENSOR_FILES, CheckpointFolder, find_checkpoint, read_state
from trainer.run.folder import CONFIG_FILE, checkpoints_of, refuse_foreign_output, write_config
from trainer.run.metrics import MetricsLog
from trainer.run.optim import make_optimizer


def save_steps(root: Path, *steps: int, keep_last: int = 3) -> CheckpointFolder:
    folder, projector = CheckpointFolder(root, keep_last), make_projector()
    optimizer = make_optimizer(projector, OptimConfig())
    projector(make_latents(4)).square().mean().backward()
    optimizer.step()
    for step in steps:
        folder.save(step, 8 * step, projector, optimizer, {"data.seed": "0"}, {"optim": {"lr": 1e-4}})
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_steps(tmp_path, 5).path(5)


def test_the_last_few_and_a_persons_copy_are_kept_and_no_scratch(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-00000005-best")
    for killed in (".step-00000005.1.partial", ".step-00000003.1.partial"):
        (tmp_path / killed).mkdir()
    folder = save_steps(tmp_path, 10, 15, 20, keep_last=2)
    assert folder.steps() == [15, 20]
    kept = ["step-00000005-best", "step-00000015", "step-00000020"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    state = read_state(folder.path(20))
    assert (state.step, state.position) == (20, 160)


def test_a_process_killed_while_saving_leaves_whole_checkpoints(tmp_path):
    folder = CheckpointFolder(tmp_path, 2)
    for attempt in range(6):
        newest = max(folder.steps(), default=0)
        steps = (tmp_path, *range(newest + 1, 100_000))
        saver = FORKED.Process(target=save_steps, args=steps, kwargs={"keep_last": 2}, daemon=True)
        saver.start()
        while max(folder.steps(), default=0) <= newest:
            assert saver.is_alive()
            time.sleep(0.001)
        time.sleep(0.004 * attempt)
        saver.kill()
        saver.join()
        assert len(folder.steps()) <= 3
        assert all(read_state(folder.path(step)).step == step for step in folder.steps())
    newest = folder.steps()[-1]
    assert save_steps(tmp_path, newest + 1, keep_last=2).steps() == [newest, newest + 1]
    assert len(list(tmp_path.iterdir())) == 2


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", TENSOR_FILES)
@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_a_damaged_or_missing_file_is_named(saved, name, damage):
    damage(saved / name)
    with pytest.raises(CacheError, match=rf"damaged: {name} does not match"):
        read_state(saved)


def test_any_flipped_bit_of_a_state_is_found(saved):
    """Every seventh, which comes to each byte and to each place in a byte."""
    sound = (saved / "state.json").read_bytes()
    for place in range(0, 8 * len(sound), 7):
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        (saved / "state.json").write_bytes(flipped)
        with pytest.raises(CacheError):
            read_state(saved)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format_version": 99}, NewerFormatError, "^((?!damaged).)*$"),
        ({"files": {"../../secret": "0", TENSOR_FILES[1]: "0"}}, CacheError, f"other files than {TENSOR_FILES[0]}"),
    ],
)
def test_a_state_that_cannot_be_ours_is_refused_though_signed(saved, changes, error, message):
    (saved / "state.json").write_bytes(canonical_json(signed(replace(read_state(saved), **changes))))
    with pytest.raises(error, match=message):
        read_state(saved)


def found(folder: CheckpointFolder, resume: str) -> Path | None:
    start = find_checkpoint(folder, resume)
    return start and start[0]


def test_resume_takes_the_newest_or_the_named_and_mixes_no_runs(tmp_path):
    folder, empty = save_steps(tmp_path / "run", 5, 10), CheckpointFolder(tmp_path / "empty", 3)
    newest = folder.path(10)
    assert found(folder, "auto") == found(folder, str(newest)) == found(empty, str(newest)) == newest
    assert found(empty, "auto") is found(empty, "never") is None
    for resume in ("never", str(folder.path(5))):
        with pytest.raises(ConfigError, match="already holds step 10"):
            find_checkpoint(folder, resume)
    newest.rename(folder.path(15))
    with pytest.raises(CacheError, match="step-00000015 holds step 10: it was renamed, or copied there"):
        find_checkpoint(folder, "auto")


def fill(folder: Path, files: dict[str, str]) -> dict[str, bytes]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return held_in(folder)


def held_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"thesis.tex": "", "made/text/.lock": ""}, "thesis.tex"),
        ({"config.yaml": "cache: /home/.cache\nlearning_rate: 1\n"}, "config.yaml"),
        ({"config.yaml": "\0"}, "config.yaml"),
        ({"metrics.jsonl": '{"epoch": 3}\n'}, "metrics.jsonl"),
        ({"checkpoints/last.ckpt": "", "projector.safetensors": ""}, "checkpoints"),
        ({"llava/config.yaml": ""}, "llava"),
    ],
)
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(configured, refusal, tmp_path, files, named):
    run = tmp_path / "run"
    before = fill(run, files)
    expected = f"run.output: {run} holds {named!r} but no run; name an empty or a new folder"
    assert refusal(2, configured(text_dir=str(run / "made" / "text"))) == f"trainer: error: {expected}\n"
    assert held_in(run) == before


def test_an_empty_folder_and_a_run_at_any_stage_are_taken(configured, tmp_path):
    run = tmp_path / "run"
    config = configured(text_dir=str(run / "made" / "text"))
    stages = [
        lambda: None,
        run.mkdir,
        lambda: fill(run, {".claim": "", ".config.yaml.1.partial": "", "made/text/.lock": ""}),
        lambda: (write_config(config), fill(run, {"metrics.jsonl": "", "notes.txt": ""})),
        lambda: (save_steps(checkpoints_of(config.run).root, 5), (run / CONFIG_FILE).unlink()),
    ]
    for leave in stages:
        leave()
        refuse_foreign_output(config)


def write_steps(folder: Path, completed: int, last: int) -> list[Any]:
    """Log the steps after those completed; the steps in the log."""
    log = MetricsLog(folder, completed)
    for step in range(completed + 1, last + 1):
        log.write({"step": step, "loss": 1.5})
    log.close()
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_log_and_tensorboard_hold_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, 0, 7)
    assert write_steps(tmp_path, 4, 6) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, 1.5) for step in range(1, 7)]


def test_a_line_that_is_no_record_is_dropped_and_the_others_stay(tmp_path):
    write_steps(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for line in (
        b'{"step": 4, "lo',
        b"[1]",
        b"7",
        b'{"loss": 1}',
        b'{"step": "2"}',
        b'{"step": 2, "x": "\xff"}',
        b"\0\0",
    ):
        path.write_bytes(line + b"\n" + whole + line)
        assert write_steps(tmp_path, 3, 4) == [1, 2, 3, 4]
