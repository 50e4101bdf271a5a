"""Workers on a real Ray of this machine: killed, joined by others, failing, stopped."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, ConfigError, EncodeOnceError
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig, RunConfig
from precompute.encode.job import EncodeJob
from precompute.encode.ray_cluster import ClusterHead, connected, say_waiting
from precompute.encode.ray_engine import in_hand, run_ray
from precompute.encoders.registry import load_encoder
from precompute.sources import open_source
from tests.precompute.conftest import SAMPLES, timeless_files
from tests.precompute.encode.engines.test_local import processes_of, wait_for

pytest.importorskip("ray", reason="needs the extra ray")

SLOW = {"store__samples_per_shard": 2, "encoder__batch_size": 1, "image__height": 96, "image__width": 120}
"""Eleven shards, so that there is time to do something in the middle of one."""
RAY = {"run__engine": "ray", **SLOW}

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A node with room for two workers, its name in RAY_ADDRESS."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **NODE})
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def workers_of(node):
    """Processes of the node's workers."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for threads_own in Path(f"/proc/{raylet}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # one has ended, or ends while it is read
            children = threads_own.read_text().split()
            found += [int(each) for each in children if "::RayWorker" in Path(f"/proc/{each}/cmdline").read_text()]
    return found


def is_writing(worker):
    """Whether it has a shard's scratch file open."""
    with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile: a stop takes a moment
        return any(str(link.readlink()).endswith(".partial") for link in Path(f"/proc/{worker}/fd").iterdir())
    return False


def send(number, worker):
    with suppress(ProcessLookupError):  # Ray has ended it
        os.kill(worker, number)


def killed_in_a_shard(node):
    """Whether one of two workers stood in the middle of a shard, and is dead now."""
    for worker in workers if len(workers := workers_of(node)) == 2 else []:
        send(signal.SIGSTOP, worker)
        whole = not is_writing(worker)
        send(signal.SIGCONT if whole else signal.SIGKILL, worker)
        if not whole:
            return True
    return False


def disturb(cluster, cache):
    """Kill a worker, let a node join, and go on once that node has committed shards while all others stood still."""
    wait_for(lambda: killed_in_a_shard(cluster.head_node))
    others = set()

    def halt():
        for worker in {*workers_of(cluster.head_node)} - others:
            send(signal.SIGSTOP, worker)
            others.add(worker)
        return committed()

    def committed():
        return len(list(cache.glob("commits/*.json")))

    before = halt()
    node = cluster.add_node(num_cpus=2, object_store_memory=NODE["object_store_memory"])
    wait_for(lambda: halt() > before + 1)
    assert workers_of(node)
    for worker in others:
        send(signal.SIGCONT, worker)


def start(project, **overrides):
    """In a session of its own, whose number is the process's."""
    command = [sys.executable, "-m", "precompute", "build", "--config", str(project.config(**RAY, **overrides))]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_killed_worker_and_a_new_node_change_no_byte(project, cluster):
    """The lost shard goes to others, and Ray places a worker on the node that joined."""
    build = start(project)
    disturb(cluster, project.cache)
    _, error = build.communicate(timeout=300)
    assert build.returncode == 0, error
    assert "a worker on Ray was lost with shard" in error
    assert f"{SAMPLES}/{SAMPLES} " in error, "images of the lost shard count once"
    project.build(name="local", **SLOW)
    assert project.files() == timeless_files(project.folder / "local")


def test_one_lost_shard_is_singular():
    said = ["before it began", "with shard 4 in hand", "with shards 4, 11 in hand"]
    assert [in_hand(shards) for shards in (set(), {4}, {11, 4})] == said


def test_a_signal_to_all_of_a_ray_of_our_own_ends_it(project, monkeypatch):
    """As batch systems send it, to Ray's processes too; a rerun goes on."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    build = start(project, run__workers=1)
    wait_for(lambda: list(project.cache.glob("commits/*.json")))
    os.killpg(build.pid, signal.SIGTERM)
    _, error = build.communicate(timeout=300)
    assert build.returncode == 3, error
    assert not {"Traceback", "leaked"} & {*error.split()}
    wait_for(lambda: not processes_of(build.pid))
    assert not (project.cache / "seal.json").exists(), "it went on to the end"
    project.build(**SLOW)
    project.build(name="undisturbed", **SLOW)
    assert project.files() == timeless_files(project.folder / "undisturbed")


def test_a_node_that_does_not_see_the_plan_is_named(built, cluster):
    """And so is whatever else a worker reports, in its own words."""
    config = replace(BuildConfig.of_cache(built.cache), run=RunConfig(engine="ray", workers=1))
    job = EncodeJob(
        config=config, store=LocalStore(built.folder / "elsewhere"), spec=read_spec(built.cache), shards=[0, 1]
    )
    source, encoder = open_source(config.source), load_encoder(config.own_encoder, config.image.range)
    message = rf"node {os.uname().nodename} does not see the plan at {built.folder}/elsewhere/plan.parquet; on Ray"
    with built.untouched(), pytest.raises(CacheError, match=message):
        run_ray(job, source, encoder, threading.Event(), lambda _: None)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1 \(.*refused\)"),
        ("http://127.0.0.1:8265", "by which Ray lends no actors to a build; run the build in the cluster, by `ray job"),
        ("nowhere", "RAY_ADDRESS is nowhere; expected HOST:PORT, or auto"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_said_at_once(monkeypatch, address, message):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EncodeOnceError, match=message), connected(2):
        pass


def test_a_build_looks_for_its_cluster_before_it_plans(project, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1" in project.build(code=1, run__engine="ray")
    assert not project.cache.exists()


def test_a_head_that_is_lost_is_told_once(logged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = ClusterHead(f"127.0.0.1:{server.getsockname()[1]}")
        head.look()
        assert head.answers
    head.look()
    head.look()
    assert not head.answers
    (line,) = logged.messages
    assert "does not answer any more" in line
    assert "run the same command again" in line


@pytest.mark.parametrize(
    ("gpus", "has", "said"),
    [
        (0, 2, "on 2 CPUs; the Ray cluster has 2 CPUs and 0 GPUs, perhaps in use"),
        (0, 0, "on 2 CPUs; the Ray cluster has 0 CPUs and 0 GPUs, too few"),
        (1, 9, "on 1 GPU; the Ray cluster has 9 CPUs and 0 GPUs, too few"),
    ],
)
def test_waiting_names_a_cluster_that_is_too_small(logged, gpus, has, said):
    """No node that is there could take the worker: not to be mistaken for a cluster in use."""
    say_waiting({"num_gpus": gpus, "num_cpus": 0 if gpus else 2}, {"CPU": has, "GPU": 0})
    assert said in logged.text


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"run.engine: ray is not installed; run `pip install 'encode-once\[ray\]'`"):
        RunConfig(engine="ray")


def test_ray_takes_the_cluster_file_that_we_ship():
    schema = Path(importlib.import_module("ray").__file__).parent / "autoscaler/ray-schema.json"
    jsonschema = importlib.import_module("jsonschema")
    jsonschema.validate(yaml.safe_load(Path("configs/ray/cluster.yaml").read_text()), json.loads(schema.read_text()))
