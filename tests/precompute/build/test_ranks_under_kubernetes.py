"""A cache in an object store, built by the commands of the manifests in the environment that Kubernetes gives."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from precompute.cli import PROGRAM, main
from tests.places import Objects

MANIFESTS = Path("deploy/kubernetes")


def read_manifests(name: str) -> dict[str, Any]:
    """Return each object's spec, or else its data, by its name."""
    objects = list(yaml.safe_load_all((MANIFESTS / name).read_text()))
    return {f"{each['kind']} {each['metadata']['name']}": each.get("spec") or each["data"] for each in objects}


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def command_of(job: dict[str, Any], config: Path) -> list[str]:
    """Return the command of a Job's container, with a config of this machine in place of the mounted one."""
    container = container_of(job)
    mounted = {f"{each['mountPath']}/build.yaml" for each in container.get("volumeMounts", [])}
    return [str(config) if word in mounted else word for word in container["args"]]


def start(job: dict[str, Any], config: Path, **environment: object) -> subprocess.Popen[str]:
    """Start a Job's container as a process; the store's credentials are in this process's environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {each["name"]: each["value"] for each in container_of(job)["env"]}
    given = own | {name: str(value) for name, value in environment.items()}
    everything = os.environ | {"PATH": path, "PYTHONPATH": str(Path.cwd())} | given
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
