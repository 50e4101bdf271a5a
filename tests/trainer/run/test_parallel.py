"""Ranks in processes of their own: whatever ends one of them ends all, in one line each."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.errors import ConfigError, EncodeOnceError
from tests.make_cache import make_cache
from tests.trainer.conftest import describe
from tests.trainer.runs import ROOT, ForkedTrainer, fork_rank, fork_ranks, make_config, meeting_of, metrics
from trainer.config import TrainConfig
from trainer.run import parallel
from trainer.run.folder import write_config
from trainer.run.parallel import join_world


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    latents = np.random.default_rng(0).standard_normal((24, 4, 2, 2), np.float32)
    return make_cache(tmp_path / "cache", latents, conversations=[describe(row) for row in range(24)])


def ends(config: TrainConfig, exit_code: int = 1) -> list[str]:
    """The one line that each of two ranks says at its end."""
    lines = []
    for code, error in [rank.end() for rank in fork_ranks(config, 2)]:
        assert code == exit_code, error
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


TWO_RANKS = """
import json, os, sys, time
from datetime import timedelta

import torch

from cache_store.errors import ConfigError, EncodeOnceError
from trainer.run import parallel

parallel.STEP, parallel.POLL_S = timedelta(seconds=1), 0.02


def long_work(world):
    world.on_main(lambda: time.sleep(2.5))
    return int(world.sum(torch.tensor(1)))


def hanging_rank(world):
    if world.rank == 1:
        time.sleep(2.5)
        return "slept"
    world.sum(torch.tensor(1))


def refused_rank_0(world):
    if world.is_main:
        raise ConfigError("refused")
    world.on_main(lambda: None)


def live(scenario, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    try:
        with parallel.join_world() as world:
            said = scenario(world)
    except EncodeOnceError as error:
        said = str(error)
    os.write(1, json.dumps([scenario.__name__, rank, said]).encode() + b"\\n")  # at once: lines stay whole


# As under torchrun, the store is another process's.
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
for scenario in (long_work, hanging_rank, refused_rank_0):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    ranks = []
    for rank in (0, 1):
        if not (child := os.fork()):
            live(scenario, rank)
            os._exit(0)
        ranks.append(child)
    for rank in ranks:
        os.waitpid(rank, 0)
"""


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, int], Any]:
    """By scenario and rank, of real ranks whose collectives wait for a second."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", TWO_RANKS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {(scenario, rank): said for scenario, rank, said in lines}


def test_rank_0_may_work_for_longer_than_a_collective_waits(said: dict[tuple[str, int], Any]) -> None:
    assert (said["long_work", 0], said["long_work", 1]) == (2, 2)


def test_a_rank_that_hangs_ends_the_others_soon(said: dict[tuple[str, int], Any]) -> None:
    assert said["hanging_rank", 0] == "another rank has not answered for 0:00:01: it hangs, or its machine does"


def test_who_waits_for_rank_0_learns_that_it_ended(said: dict[tuple[str, int], Any]) -> None:
    assert said["refused_rank_0", 0] == "refused"
    assert said["refused_rank_0", 1] == "another rank ended: its message says why"


def be_impatient() -> None:
    """Tell at once of waiting for the others."""
    parallel.QUIET_S = 0.0


def end_well(*ranks: ForkedTrainer) -> None:
    for code, error in [rank.end() for rank in ranks]:
        assert code == 0, error


def test_a_rank_that_comes_late_is_waited_for_and_trains_as_if_it_had_not_been(
    own_cache: Path, language_model: Path, tmp_path: Path
) -> None:
    """Rank 1 in a fresh run, whose text is still to be made; rank 0 where the run goes on."""
    together = make_config(own_cache, language_model, tmp_path / "together", max_steps=4, schedule="constant")
    end_well(*fork_ranks(together, 2))
    for late, max_steps in ((1, 2), (0, 4)):
        config = make_config(
            own_cache, language_model, tmp_path / "run", max_steps=max_steps, schedule="constant", text_dir=None
        )
        meeting = meeting_of(2)
        early = fork_rank(config, 1 - late, meeting, be_impatient)
        early.until_it_says("waits at 127.0.0.1:")
        end_well(early, fork_rank(config, late, meeting))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "together")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_wait_for_a_rank_that_never_comes(
    rank: int, own_cache: Path, language_model: Path, tmp_path: Path
) -> None:
    config = make_config(own_cache, language_model, tmp_path / "run")
    process = fork_rank(config, rank, meeting_of(2), be_impatient)
    process.until_it_says("waits at 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    code, error = process.end()
    assert code == 3, error
    assert "trainer: stopped: " in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_never_comes_is_an_error_that_says_how_ranks_are_started(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(parallel, "QUIET_S", 0.0)
    for name, value in {**meeting_of(2), "LOCAL_RANK": "0", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(EncodeOnceError, match=r"(?s)did not meet at 127.*; all 2 must be started together"),
        join_world(),
    ):
        pass
    assert f"trainer: rank {rank} waits at 127.0.0.1:" in capfd.readouterr().err


def test_a_port_that_is_none_is_an_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**meeting_of(2), "LOCAL_RANK": "0", "RANK": "0", "MASTER_PORT": "99999"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EncodeOnceError, match="port must have value from 0 to 65535"), join_world():
        pass
