import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from cache_store.errors import CacheError, ConfigError, NewerFormatError, StaleError
from cache_store.format.record import canonical_json, signed
from tests.trainer.model.test_projector import make_latents, make_projector
from tests.trainer.runs import FORKED
from trainer.config import OptimConfig
from trainer.model.projector import Projector
from trainer.run.checkpoint import (
    CheckpointFolder,
    find_checkpoint,
    load_optimizer,
    load_projector,
    read_state,
    refuse_other_run,
)
from trainer.run.optim import make_optimizer

MATCH = {"cache identity": "ab" * 32, "data.seed": "0"}


def train_a_little(steps: int = 3) -> tuple[Projector, torch.optim.AdamW]:
    projector = make_projector()
    optimizer = make_optimizer(projector, OptimConfig())
    more_steps(projector, optimizer, steps)
    return projector, optimizer


def more_steps(projector: Projector, optimizer: torch.optim.AdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        projector(make_latents(4)).square().mean().backward()
        optimizer.step()


def save_steps(root: Path, *steps: int, keep_last: int = 3) -> CheckpointFolder:
    folder = CheckpointFolder(root, keep_last)
    projector, optimizer = train_a_little()
    for step in steps:
        folder.save(step, 8 * step, projector, optimizer, MATCH, {"optim": {"lr": 1e-4}})
    return folder


def test_a_checkpoint_restores_every_bit(tmp_path):
    projector, optimizer = train_a_little()
    CheckpointFolder(tmp_path, 3).save(3, 24, projector, optimizer, MATCH, {})
    restored = make_projector(seed=9)
    restored_optimizer = make_optimizer(restored, OptimConfig())
    load_projector(tmp_path / "step-00000003", restored)
    load_optimizer(tmp_path / "step-00000003", restored_optimizer)
    more_steps(projector, optimizer, 4)
    more_steps(restored, restored_optimizer, 4)
    for name, tensor in projector.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name])


def test_the_last_few_are_kept(tmp_path):
    folder = save_steps(tmp_path, 5, 10, 15, 20, keep_last=2)
    assert folder.steps() == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]
    state = read_state(folder.path(20))
    assert (state.step, state.position) == (20, 160)


def test_a_persons_copy_of_a_checkpoint_is_left_alone(tmp_path):
    shutil.copytree(save_steps(tmp_path, 5).path(5), tmp_path / "step-00000005-best")
    folder = save_steps(tmp_path, 10, keep_last=1)
    assert folder.steps() == [10]
    assert (tmp_path / "step-00000005-best").exists()


def test_what_a_killed_run_left_goes_with_the_next_checkpoint(tmp_path):
    for name in (".step-00000005.1.partial", ".step-00000003.1.partial"):
        (tmp_path / name).mkdir()
    save_steps(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_another_run_is_refused_with_what_differs(tmp_path):
    path = save_steps(tmp_path, 5).path(5)
    with pytest.raises(StaleError, match=r"data\.seed +0 +7") as caught:
        refuse_other_run(path, read_state(path), {**MATCH, "data.seed": "7"})
    assert "cache identity" not in str(caught.value)
    assert "--run.output NEW" in str(caught.value)


def test_another_cache_is_refused_and_says_what_became_of_it(tmp_path):
    path = save_steps(tmp_path, 5).path(5)
    with pytest.raises(StaleError, match=r"cache identity +abababababab… +cdcdcdcdcdcd…") as caught:
        refuse_other_run(path, read_state(path), {**MATCH, "cache identity": "cd" * 32})
    assert "the cache was extended, rebuilt or replaced since" in str(caught.value)


@pytest.mark.parametrize("name", ["projector.safetensors", "optimizer.safetensors"])
def test_a_damaged_or_missing_file_is_named(tmp_path, name):
    file = save_steps(tmp_path, 5).path(5) / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    for damage in (lambda: file.write_bytes(data), file.unlink):
        damage()
        with pytest.raises(CacheError, match=rf"damaged: {name} does not match"):
            read_state(file.parent)


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(tmp_path):
    path = save_steps(tmp_path, 5).path(5)
    newer = signed(replace(read_state(path), format_version=99))
    (path / "state.json").write_bytes(canonical_json(newer))
    with pytest.raises(NewerFormatError) as caught:
        read_state(path)
    assert "damaged" not in str(caught.value)


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path):
    folder = save_steps(tmp_path, 99_999_999, 100_000_000)
    assert found(folder, "auto") == folder.path(100_000_000)


def test_a_state_that_vouches_for_other_files_is_refused(tmp_path):
    path = save_steps(tmp_path, 5).path(5)
    state = read_state(path)
    files = {"../../secret": state.files["projector.safetensors"], "optimizer.safetensors": "0"}
    (path / "state.json").write_bytes(canonical_json(signed(replace(state, files=files))))
    with pytest.raises(CacheError, match="lists other files than projector.safetensors"):
        read_state(path)


def test_any_flipped_bit_of_a_state_is_found(tmp_path):
    path = save_steps(tmp_path, 5).path(5) / "state.json"
    sound = path.read_bytes()
    for place in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CacheError):
            read_state(path.parent)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    folder = save_steps(tmp_path, 5)
    shutil.copytree(folder.path(5), folder.path(10))
    with pytest.raises(CacheError, match="step-00000010 holds step 5: it was renamed, or copied there"):
        find_checkpoint(folder, "auto")


def found(folder: CheckpointFolder, resume: str) -> Path | None:
    start = find_checkpoint(folder, resume)
    return start and start[0]


def test_resume_finds_the_newest_the_named_or_none(tmp_path):
    folder = save_steps(tmp_path / "run", 5, 10)
    assert found(folder, "auto") == folder.path(10)
    assert found(folder, str(folder.path(10))) == folder.path(10)
    empty = CheckpointFolder(tmp_path / "empty", 3)
    assert found(empty, "auto") is None
    assert found(empty, "never") is None
    assert found(empty, str(folder.path(5))) == folder.path(5)


def test_two_runs_are_never_mixed_in_one_folder(tmp_path):
    folder = save_steps(tmp_path, 5, 10)
    for resume in ("never", str(folder.path(5))):
        with pytest.raises(ConfigError, match="already holds step 10"):
            find_checkpoint(folder, resume)
    for other in (tmp_path / "elsewhere", folder.path(5) / "state.json"):
        with pytest.raises(ConfigError, match="is no checkpoint"):
            find_checkpoint(folder, str(other))


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
    process = FORKED.Process(target=save_and_kill, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    newest = CheckpointFolder(tmp_path, 2).steps()[-1]
    assert newest >= 6
    assert save_steps(tmp_path, newest + 1, keep_last=2).steps() == [newest, newest + 1]
    assert len(list(tmp_path.iterdir())) == 2
