import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cache_store.errors import CacheError, ConfigError, StaleError
from tests.trainer.test_projector import make_latents, make_projector
from trainer.checkpoint import (
    CheckpointFolder,
    find_checkpoint,
    load_optimizer,
    load_projector,
    read_state,
    refuse_other_run,
)
from trainer.config import OptimConfig
from trainer.optim import make_optimizer
from trainer.projector import Projector

ROOT = Path(__file__).parents[2]
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


def test_a_checkpoint_restores_projector_and_optimizer_bit_for_bit(tmp_path: Path) -> None:
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


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    folder = save_steps(tmp_path, 5, 10, 15, 20, keep_last=2)
    assert folder.steps() == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]
    state = read_state(folder.path(20))
    assert (state.step, state.position) == (20, 160)


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = save_steps(tmp_path, 5).path(5)
    with pytest.raises(StaleError, match=r"data\.seed +0 +7") as caught:
        refuse_other_run(path, read_state(path), {**MATCH, "data.seed": "7"})
    assert "cache identity" not in str(caught.value)
    assert "another run.output" in str(caught.value)


@pytest.mark.parametrize("name", ["projector.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_names_its_file(tmp_path: Path, name: str) -> None:
    path = save_steps(tmp_path, 5).path(5)
    data = bytearray((path / name).read_bytes())
    data[-3] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CacheError, match=rf"damaged: {name}"):
        read_state(path)


def test_resume_finds_the_newest_the_named_or_none(tmp_path: Path) -> None:
    folder = save_steps(tmp_path / "run", 5, 10)
    assert find_checkpoint(folder, "auto") == folder.path(10)
    assert find_checkpoint(folder, str(folder.path(10))) == folder.path(10)
    empty = CheckpointFolder(tmp_path / "empty", 3)
    assert find_checkpoint(empty, "auto") is None
    assert find_checkpoint(empty, "never") is None
    assert find_checkpoint(empty, str(folder.path(5))) == folder.path(5)


def test_two_runs_are_never_mixed_in_one_folder(tmp_path: Path) -> None:
    folder = save_steps(tmp_path, 5, 10)
    for resume in ("never", str(folder.path(5))):
        with pytest.raises(ConfigError, match="already holds step 10"):
            find_checkpoint(folder, resume)
    with pytest.raises(ConfigError, match="is no checkpoint"):
        find_checkpoint(folder, str(tmp_path / "elsewhere"))


SAVE_FOREVER = """
import itertools, sys
from pathlib import Path
from tests.trainer.test_checkpoint import save_steps
print("ready", flush=True)
save_steps(Path(sys.argv[1]), *range(1, 100_000), keep_last=2)
"""


def test_a_process_killed_while_saving_leaves_whole_checkpoints_or_nothing(tmp_path: Path) -> None:
    for attempt in range(3):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.07 * attempt)
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        folder = CheckpointFolder(tmp_path, 2)
        assert len(folder.steps()) <= 3
        for step in folder.steps():
            assert read_state(folder.path(step)).step == step
    newest = folder.steps()[-1]
    assert save_steps(tmp_path, newest + 1, keep_last=2).steps()[-1] == newest + 1
