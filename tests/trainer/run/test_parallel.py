"""Ranks in processes of their own: if one ends, all end, each with one line."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.named import assert_names
from tests.slurm import PATIENCE_S, running_slurm
from tests.trainer.conftest import described_cache
from tests.trainer.runs import assert_same_run, command, end_well, fork_rank, fork_ranks, meeting_of_two, metrics
from trainer.data.batches import StepLoader
from trainer.run import parallel, session
from trainer.run.folder import write_config


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
    return described_cache(tmp_path / "cache", 24)


OBSTRUCTIONS = {
    "a batch that does not divide": (lambda home: None, 2, "data.batch_size 7"),
    "no log": (lambda home: (home / "run/metrics.jsonl").mkdir(), 1, "metrics.jsonl"),
    "no folder for its text": (lambda home: (home / "text").touch(), 2, "/text"),
}


@pytest.mark.parametrize(("obstruct", "code", "names"), OBSTRUCTIONS.values(), ids=OBSTRUCTIONS)
def test_an_error_of_rank_0_is_told_once_and_ends_the_others(configured, tmp_path, obstruct, code, names):
    config = configured(batch_size=7 if "batch_size" in names else 8)
    write_config(config)
    obstruct(tmp_path)
    ended = [rank.end() for rank in fork_ranks(config)]
    assert [exit_code for exit_code, _ in ended] == [code, 1]
    assert not any("Traceback" in error for _, error in ended)
    first, second = [line for _, error in ended for line in error.splitlines() if line.startswith("trainer: ")]
    assert_names(first, names)
    assert "another rank" in second
    assert not set(names.split()) & set(second.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "code", "names"),
    [
        ({"RANK": "0", "MASTER_ADDR": ""}, 1, "MASTER_ADDR"),
        ({"RANK": "1"}, 1, "2"),
    ],
)
def test_ranks_that_cannot_meet_are_an_error(configured, refusal, monkeypatch, environment, code, names):
    """The environment is one that no launcher makes, or the other rank never comes."""
    monkeypatch.setattr(parallel, "START_UP_TIMEOUT", timedelta(seconds=2))
    for name, value in {**meeting_of_two(), **environment}.items():
        monkeypatch.setenv(name, value)
    refusal(code, configured(), names=names)


TIMEOUT = timedelta(seconds=8)
"""Longer than a slow and busy machine needs between two steps."""


def shorten_waits() -> None:
    parallel.COLLECTIVE_TIMEOUT, parallel.POLL_S = TIMEOUT, 0.02


def work_for_longer() -> None:
    shorten_waits()
    verify = session.verify
    session.verify = lambda *given, **named: time.sleep(1.25 * TIMEOUT.total_seconds()) or verify(*given, **named)


def hang() -> None:
    shorten_waits()
    StepLoader.__call__ = lambda *_: signal.pause()


@pytest.mark.slow
def test_rank_0_may_work_for_longer_than_a_collective_waits(configured):
    end_well(*fork_ranks(configured(max_steps=1), work_for_longer, work_for_longer))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others(configured):
    waiting, hanging = fork_ranks(configured(), shorten_waits, hang)
    code, error = waiting.end()
    hanging.send_signal(signal.SIGKILL)
    hanging.end()
    assert (code, "0:00:08" in error) == (1, True)


def be_impatient() -> None:
    """Report at once that this rank waits for the others."""
    parallel.UNREPORTED_WAIT_S = 0.0


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_for_a_rank_that_never_comes(configured, tmp_path):
    process = fork_rank(configured(), 1, meeting_of_two(), be_impatient)
    process.until_it_says("waits at 127.0.0.1:")
    process.send_signal(signal.SIGINT)
    code, error = process.end()
    assert (code, "trainer: stopped: " in error) == (3, True)
    assert not (tmp_path / "run").exists()


# A real Slurm, and the shipped script.

SCRIPT = "configs/slurm/train.sbatch"
HERE = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
"""In place of the script's two nodes of eight GPUs."""


@pytest.mark.slow
def test_a_job_told_to_stop_resumes_when_submitted_again(configured, tmp_path):
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": programs, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    whole, stopped = (configured(name, max_steps=200, save_every=1_000, eval_every=1_000) for name in ("a", "b"))
    with running_slurm(tmp_path) as slurm:

        def submit(config):
            _, *options = command(config)
            return slurm.submit(*HERE, f"--output={tmp_path}/output", SCRIPT, *options, **environment)

        assert slurm.until_ended(submit(whole)) == ("COMPLETED", 0), (tmp_path / "output").read_text()
        job = submit(stopped)
        until_step(stopped.run.folder, 5)
        slurm.signal(job, "TERM")
        assert slurm.until_ended(job) == ("FAILED", 3)
        assert len(metrics(stopped.run.folder)) < 200
        assert slurm.until_ended(submit(stopped)) == ("COMPLETED", 0)
    assert_same_run(whole, stopped)


def until_step(folder, step):
    give_up = time.monotonic() + PATIENCE_S
    while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < step:
        assert time.monotonic() < give_up
        time.sleep(0.05)
