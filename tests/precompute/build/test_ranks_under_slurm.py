"""A cache built under a real Slurm, with the script that is shipped."""

import os
import sys
from pathlib import Path

from precompute.cli import main
from tests.precompute.conftest import timeless_files
from tests.slurm import running_slurm

SCRIPT = "configs/slurm/build.sbatch"
HERE = ["--gpus-per-node=0", "--cpus-per-task=1"]
"""Options that replace the script's eight GPUs."""

KINDS = {"array": (["--array=0-1"], [0, 1]), "step": (["--array=0", "--ntasks-per-node=2"], [0])}
"""Two ways to start two ranks: sbatch options, and the array's tasks."""


def test_an_array_and_a_step_of_two_build_what_one_process_does(built, tmp_path):
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path.cwd()),
        "OMP_NUM_THREADS": "1",
    }
    with running_slurm(tmp_path) as slurm:
        for name, (options, tasks) in KINDS.items():
            config = str(built.config(name, run__workers=1))
            assert "22 samples in 3 shards" in built.run(main, "plan", "--config", config)
            output = f"--output={tmp_path}/{name}-%a"
            job = slurm.submit(*HERE, *options, output, SCRIPT, "--config", config, **environment)
            ends = [slurm.until_ended(f"{job}_{task}") for task in tasks]
            said = "".join((tmp_path / f"{name}-{task}").read_text() for task in tasks)
            assert ends == [("COMPLETED", 0)] * len(tasks), said
            assert "rank 0 of 2 encoded 14 images in 2 shards" in said
            assert "rank 1 of 2 encoded 8 images in 1 shard," in said
            built.run(main, "seal", "--config", config)
            assert timeless_files(built.folder / name) == built.files()
