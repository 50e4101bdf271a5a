"""A build on Ray's own autoscaler, whose nodes are real Rays of this machine: the head has no core to encode on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from cache_store.errors import EncodeOnceError
from precompute.encode.ray_cluster import refuse_silent
from tests.precompute.conftest import timeless_files
from tests.precompute.encode.engines.test_local import processes_of, wait_for
from tests.precompute.encode.engines.test_ray import LOOPBACK, NODE, SLOW
from tests.slurm import free_port

pytest.importorskip("ray", reason="needs the extra ray")

HEAD = "ray.head.default"


def cluster_file(address):
    """Of up to two nodes of two cores, which Ray's provider for tests starts as processes here."""
    node = {"CPU": 2, "object_store_memory": NODE["object_store_memory"]}
    types = {
        HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "cpu": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "grows",
        "max_workers": 2,
        "idle_timeout_minutes": 1,
        "upscaling_speed": 100.0,
        "provider": {"type": "fake_multinode", "gcs_address": address, "disable_node_updaters": True},
        "available_node_types": types,
        "head_node_type": HEAD,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **{f"{name}_commands": [] for name in lists},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }


@pytest.fixture
def growing():
    """The address of a cluster without a worker, and its head."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # names of sockets are short
        path = Path(folder, "cluster.json")
        path.write_text(json.dumps(cluster_file(address)))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"]
        command += [f"--port={address.rpartition(':')[2]}", f"--autoscaling-config={path}", f"--temp-dir={folder}"]
        command += [f"--object-store-memory={NODE['object_store_memory']}", "--include-dashboard=false"]
        settings = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled"}
        head = subprocess.Popen(
            command,
            env={**os.environ, **LOOPBACK, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield address, head
        finally:
            for process in processes_of(head.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            head.wait()


def nodes_of(session):
    return [line for line in processes_of(session).values() if "raylet/raylet\0" in line]


def test_an_autoscaling_cluster_starts_the_nodes_that_a_build_wants(project, growing, monkeypatch):
    address, head = growing

    def answers():
        assert head.poll() is None, "it has ended"
        try:
            refuse_silent(address)
        except EncodeOnceError:
            return False
        return True

    wait_for(answers)
    for name, value in (LOOPBACK | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}).items():
        monkeypatch.setenv(name, value)
    config = project.config(run__engine="ray", **SLOW)
    build = [sys.executable, "-m", "precompute", "build", "--config", str(config)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(nodes_of(head.pid)) > 1, "others than the head's"
    project.build(name="local", **SLOW)
    assert project.files() == timeless_files(project.folder / "local")
