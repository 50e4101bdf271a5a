"""A run of two ranks under a real Slurm, by the shipped script."""

import os
import sys
import time
from pathlib import Path

from tests.slurm import PATIENCE_S, running_slurm
from tests.trainer.runs import assert_same_run, command, metrics

SCRIPT = "configs/slurm/train.sbatch"
HERE = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
"""In place of the script's two nodes of eight GPUs."""


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
