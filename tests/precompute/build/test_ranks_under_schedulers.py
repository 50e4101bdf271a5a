"""A cache built under a real Slurm, with the script that is shipped, and by the commands of Kubernetes' manifests."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from precompute.cli import PROGRAM, main
from tests.places import Objects
from tests.precompute.conftest import timeless_files
from tests.slurm import running_slurm

HERE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
"""An environment with this checkout's programs."""


def read_manifests(name: str) -> dict[str, Any]:
    """Return each object's spec, or else its data, by its name."""
    objects = list(yaml.safe_load_all((Path("deploy/kubernetes") / name).read_text()))
    return {f"{each['kind']} {each['metadata']['name']}": each.get("spec") or each["data"] for each in objects}


def command_of(job: dict[str, Any], config: Path) -> list[str]:
    """Return the command of a Job's container, with a config of this machine in place of the mounted one."""
    (container,) = job["template"]["spec"]["containers"]
    mounted = {f"{each['mountPath']}/build.yaml" for each in container.get("volumeMounts", [])}
    return [str(config) if word in mounted else word for word in container["args"]]


def start(job: dict[str, Any], config: Path, **environment: object) -> subprocess.Popen[str]:
    """Start a Job's container as a process; the store's credentials are in this process's environment."""
    (container,) = job["template"]["spec"]["containers"]
    own = {each["name"]: each["value"] for each in container["env"]}
    everything = os.environ | HERE | own | {name: str(value) for name, value in environment.items()}
    command = command_of(job, config)
    return subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_an_indexed_job_builds_what_one_process_does(built, bucket, server):
    jobs = read_manifests("build.yaml")
    expected, built.caches = built.files(), Objects(bucket, server.endpoint)
    config = built.config(run__workers=1)
    assert "22 samples in 3 shards" in built.run(main, *command_of(jobs["Job plan"], config)[1:])
    ranks = range(jobs["Job build"]["completions"])
    said = "".join(map(output, [start(jobs["Job build"], config, JOB_COMPLETION_INDEX=rank) for rank in ranks]))
    assert "rank 0 of 2 encoded 14 images in 2 shards" in said
    assert "rank 1 of 2 encoded 8 images in 1 shard," in said
    built.run(main, *command_of(jobs["Job seal"], config)[1:])
    assert built.files() == expected
    night = read_manifests("verify.yaml")["CronJob verify"]["jobTemplate"]["spec"]
    said = output(start(night, config, CACHE=built.place.address))
    assert "sound (full, subset" in said or "holds none of 3 shards: all were checked at level quick" in said


def test_the_config_of_the_manifest_is_one_of_a_build(tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text(read_manifests("build.yaml")["ConfigMap build"]["build.yaml"])
    assert PROGRAM.parse(["build", "--config", str(path)]).config.prepared().cache.startswith("s3://")


NO_GPU = ["--gpus-per-node=0", "--cpus-per-task=1"]
"""Options that replace the script's eight GPUs."""

KINDS = {"array": (["--array=0-1"], [0, 1]), "step": (["--array=0", "--ntasks-per-node=2"], [0])}
"""Two ways to start two ranks: sbatch options, and the array's tasks."""


def test_an_array_and_a_step_of_two_build_what_one_process_does(built, tmp_path):
    with running_slurm(tmp_path) as slurm:
        for name, (options, tasks) in KINDS.items():
            config = str(built.config(name, run__workers=1))
            assert "22 samples in 3 shards" in built.run(main, "plan", "--config", config)
            output = f"--output={tmp_path}/{name}-%a"
            script = "configs/slurm/build.sbatch", "--config", config
            job = slurm.submit(*NO_GPU, *options, output, *script, **HERE, OMP_NUM_THREADS="1")
            ends = [slurm.until_ended(f"{job}_{task}") for task in tasks]
            said = "".join((tmp_path / f"{name}-{task}").read_text() for task in tasks)
            assert ends == [("COMPLETED", 0)] * len(tasks), said
            assert "rank 0 of 2 encoded 14 images in 2 shards" in said
            assert "rank 1 of 2 encoded 8 images in 1 shard," in said
            built.run(main, "seal", "--config", config)
            assert timeless_files(built.folder / name) == built.files()
