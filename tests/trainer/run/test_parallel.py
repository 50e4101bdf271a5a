"""Ranks in processes of their own: whatever ends one of them ends all, in one line each."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.errors import ConfigError, EncodeOnceError
from tests.make_cache import make_cache
from tests.trainer.conftest import describe
from tests.trainer.runs import FORKED, end_well, fork_rank, fork_ranks, meeting_of, metrics
from trainer.config import TrainConfig
from trainer.run import parallel
from trainer.run.folder import write_config
from trainer.run.parallel import World, join_world


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
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


def test_a_cache_that_rank_0_refuses_ends_the_others(configured, cache_path):
    shard = cache_path / "latents" / "c" / "1" / "0" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:-50])
    first, second = ends(configured())
    assert "damaged" in first
    assert second == "trainer: error: another rank ended: its message says why"


def test_a_rank_that_fails_between_steps_ends_the_others(configured, tmp_path):
    """Only rank 0 logs, and cannot."""
    config = configured()
    write_config(config)
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    first, second = ends(config)
    assert "metrics.jsonl" in first
    assert second.startswith("trainer: error: another rank ended: its message says why (")


def test_text_that_rank_0_cannot_write_ends_the_others(configured, tmp_path):
    (tmp_path / "file").touch()
    config = configured(text_dir=str(tmp_path / "file"))
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
def test_an_environment_that_no_launcher_made_is_refused(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), join_world():
        pass


def long_work(world: World) -> int:
    world.on_main(lambda: time.sleep(6))
    return int(world.sum(torch.tensor(1)))


def hanging_rank(world: World) -> str | None:
    if world.rank == 1:
        time.sleep(6)
        return "slept"
    world.sum(torch.tensor(1))
    return None


def refused_rank_0(world: World) -> None:
    if world.is_main:
        raise ConfigError("refused")
    world.on_main(lambda: None)


def live(scenario: Callable[[World], object], rank: int, file: Path) -> None:
    """One rank of two, whose collectives wait for three seconds; what it says at its end goes into `file`."""
    parallel.STEP, parallel.POLL_S = timedelta(seconds=3), 0.02
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    try:
        with join_world() as world:
            said = scenario(world)
    except EncodeOnceError as error:
        said = str(error)
    file.write_text(json.dumps(said))


def live_together(folder: Path) -> None:
    """As under torchrun, the store is another process's."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for scenario in (long_work, hanging_rank, refused_rank_0):
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["MASTER_PORT"] = str(store.port)
        ranks = []
        for rank in (0, 1):
            if not (child := os.fork()):
                live(scenario, rank, folder / f"{scenario.__name__}-{rank}")
                os._exit(0)
            ranks.append(child)
        for child in ranks:
            os.waitpid(child, 0)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """By scenario and rank."""
    folder = tmp_path_factory.mktemp("said")
    process = FORKED.Process(target=live_together, args=(folder,))
    process.start()
    process.join(120)
    return {file.name: json.loads(file.read_text()) for file in folder.iterdir()}


def test_rank_0_may_work_for_longer_than_a_collective_waits(said):
    assert (said["long_work-0"], said["long_work-1"]) == (2, 2)


def test_a_rank_that_hangs_ends_the_others_soon(said):
    assert said["hanging_rank-0"] == "another rank has not answered for 0:00:03: it hangs, or its machine does"


def test_who_waits_for_rank_0_learns_that_it_ended(said):
    assert said["refused_rank_0-0"] == "refused"
    assert said["refused_rank_0-1"] == "another rank ended: its message says why"


def be_impatient() -> None:
    """Tell at once of waiting for the others."""
    parallel.QUIET_S = 0.0


def test_a_rank_that_comes_late_is_waited_for(configured, tmp_path):
    """Rank 1 in a fresh run, whose text is still to be made; rank 0 where the run goes on."""
    together = configured("together", max_steps=4, schedule="constant")
    end_well(*fork_ranks(together, 2))
    for late, max_steps in ((1, 2), (0, 4)):
        config = configured(max_steps=max_steps, schedule="constant", text_dir=None)
        meeting = meeting_of(2)
        early = fork_rank(config, 1 - late, meeting, be_impatient)
        early.until_it_says("waits at 127.0.0.1:")
        end_well(early, fork_rank(config, late, meeting))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "together")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_wait_for_a_rank_that_never_comes(rank, configured, tmp_path):
    config = configured()
    process = fork_rank(config, rank, meeting_of(2), be_impatient)
    process.until_it_says("waits at 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    code, error = process.end()
    assert code == 3, error
    assert "trainer: stopped: " in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_never_comes_is_an_error_that_says_what_to_do(rank, monkeypatch, capfd):
    monkeypatch.setattr(parallel, "START_UP", timedelta(seconds=1))
    monkeypatch.setattr(parallel, "QUIET_S", 0.0)
    for name, value in {**meeting_of(2), "LOCAL_RANK": "0", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(EncodeOnceError, match=r"(?s)did not meet at 127.*; all 2 must be started together"),
        join_world(),
    ):
        pass
    assert f"trainer: rank {rank} waits at 127.0.0.1:" in capfd.readouterr().err


def test_a_port_that_is_none_is_an_error_and_no_traceback(monkeypatch):
    for name, value in {**meeting_of(2), "LOCAL_RANK": "0", "RANK": "0", "MASTER_PORT": "99999"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EncodeOnceError, match="port must have value from 0 to 65535"), join_world():
        pass
