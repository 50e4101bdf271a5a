"""Ranks in processes of their own: whatever ends one of them ends all, in one line each."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import ConfigError
from tests.make_cache import make_cache
from tests.trainer.conftest import describe
from tests.trainer.runs import make_config, start_ranks
from trainer.config import TrainConfig
from trainer.parallel import join_world
from trainer.run_folder import write_config


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    latents = np.random.default_rng(0).standard_normal((24, 4, 2, 2), np.float32)
    return make_cache(tmp_path / "cache", latents, conversations=[describe(row) for row in range(24)])


def ends(config: TrainConfig, exit_code: int = 1) -> list[str]:
    """The one line that each of two ranks says at its end."""
    lines = []
    ranks = start_ranks(config, 2)
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    for process, error in zip(ranks, errors, strict=True):
        assert process.returncode == exit_code, error
        assert "Traceback" not in error
        lines += [line for line in error.splitlines() if line.startswith("trainer: ")]
    assert len(lines) == 2
    return lines


def test_a_cache_that_rank_0_refuses_ends_the_others_in_one_line(
    own_cache: Path, language_model: Path, tmp_path: Path
) -> None:
    shard = own_cache / "latents" / "c" / "1" / "0" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:-50])
    first, second = ends(make_config(own_cache, language_model, tmp_path / "run"))
    assert "damaged" in first
    assert second == "trainer: error: another rank ended: its message says why"


def test_a_rank_that_fails_between_steps_ends_the_others_in_one_line(
    own_cache: Path, language_model: Path, tmp_path: Path
) -> None:
    """Only rank 0 logs, and cannot."""
    config = make_config(own_cache, language_model, tmp_path / "run")
    write_config(config)
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    first, second = ends(config)
    assert "metrics.jsonl" in first
    assert second.startswith("trainer: error: another rank ended: its message says why (")


def test_text_that_rank_0_cannot_write_ends_the_others_in_one_line(
    own_cache: Path, language_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = make_config(own_cache, language_model, tmp_path / "run", text_dir=str(tmp_path / "file"))
    first, second = ends(config, exit_code=2)
    assert str(tmp_path / "file") in first
    assert second == "trainer: error: another rank ended: its message says why"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "abc"}, "RANK must be a whole number of at least 0, got 'abc'; torchrun sets"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number of at least 1, got '0'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK is 2, of WORLD_SIZE 2"),
    ],
)
def test_an_environment_that_no_launcher_made_is_refused(
    environment: Mapping[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), join_world():
        pass
