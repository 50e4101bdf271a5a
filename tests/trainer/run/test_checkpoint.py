import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.record import canonical_json, signed
from tests.trainer.model.test_projector import make_latents, make_projector
from tests.trainer.runs import FORKED, PATIENCE_S
from trainer.config import OptimConfig
from trainer.run.checkpoint import CheckpointFolder, find_checkpoint, read_state
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


@pytest.mark.parametrize("name", ["projector.safetensors", "optimizer.safetensors"])
def test_a_damaged_or_missing_file_is_named(saved, name):
    file = saved / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    for damage in (lambda: file.write_bytes(data), file.unlink):
        damage()
        with pytest.raises(CacheError, match=rf"damaged: {name} does not match"):
            read_state(saved)


def sign_anew(checkpoint: Path, **changes: Any) -> None:
    (checkpoint / "state.json").write_bytes(canonical_json(signed(replace(read_state(checkpoint), **changes))))


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(saved):
    sign_anew(saved, format_version=99)
    with pytest.raises(NewerFormatError) as caught:
        read_state(saved)
    assert "damaged" not in str(caught.value)


def test_a_state_that_vouches_for_other_files_is_refused(saved):
    sign_anew(saved, files={"../../secret": "0", "optimizer.safetensors": "0"})
    with pytest.raises(CacheError, match="lists other files than projector.safetensors"):
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


def test_a_checkpoint_under_the_name_of_another_step_is_refused(saved):
    folder = CheckpointFolder(saved.parent, 3)
    shutil.copytree(saved, folder.path(10))
    with pytest.raises(CacheError, match="step-00000010 holds step 5: it was renamed, or copied there"):
        find_checkpoint(folder, "auto")


def found(folder: CheckpointFolder, resume: str) -> Path | None:
    start = find_checkpoint(folder, resume)
    return start and start[0]


@pytest.mark.parametrize("newest", [10, 100_000_000], ids=["eight digits", "nine digits"])
def test_resume_finds_the_newest_the_named_or_none(tmp_path, newest):
    folder = save_steps(tmp_path / "run", newest - 1, newest)
    assert found(folder, "auto") == found(folder, str(folder.path(newest))) == folder.path(newest)
    empty = CheckpointFolder(tmp_path / "empty", 3)
    assert found(empty, "auto") is None
    assert found(empty, "never") is None
    assert found(empty, str(folder.path(newest))) == folder.path(newest)


def test_two_runs_are_never_mixed_in_one_folder(saved):
    folder = save_steps(saved.parent, 10)
    for resume in ("never", str(saved)):
        with pytest.raises(ConfigError, match="already holds step 10"):
            find_checkpoint(folder, resume)


def save_and_kill(root: Path) -> None:
    folder, newest = CheckpointFolder(root, 2), 0
    for attempt in range(6):
        if (saver := os.fork()) == 0:
            save_steps(root, *range(newest + 1, 100_000), keep_last=2)
        while max(folder.steps(), default=0) <= newest:
            time.sleep(0.001)
        time.sleep(0.004 * attempt)
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        assert len(folder.steps()) <= 3
        assert all(read_state(folder.path(step)).step == step for step in folder.steps())
        newest = folder.steps()[-1]


def test_a_process_killed_while_saving_leaves_whole_checkpoints(tmp_path):
    process = FORKED.Process(target=save_and_kill, args=(tmp_path,), daemon=True)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    newest = CheckpointFolder(tmp_path, 2).steps()[-1]
    assert newest >= 6
    assert save_steps(tmp_path, newest + 1, keep_last=2).steps() == [newest, newest + 1]
    assert len(list(tmp_path.iterdir())) == 2
