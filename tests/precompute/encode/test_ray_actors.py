"""Workers on a real Ray of this machine: killed, failing, stopped, joined by others; and unusable clusters."""

import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml

from cache_store.cache.metadata import read_spec
from cache_store.errors import CacheError, ConfigError
from cache_store.format.array import Size
from cache_store.storage.local import LocalStore
from cache_store.storage.threads import STOP_REQUEST
from precompute.config import BuildConfig, RunConfig
from precompute.encode.job import EncodeJob, MismatchedShard, Progress
from precompute.encode.ray_actors import RayWorker, run_on_ray
from tests.named import assert_names
from tests.precompute.conftest import SAMPLES, timeless_files
from tests.precompute.encode.builds import start_build, wait_for

pytest.importorskip("ray", reason="needs the extra ray")

SLOW = {"store__samples_per_shard": 2, "encoder__batch_size": 1, "image__height": 96, "image__width": 120}
"""Eleven shards, which leave time to disturb a build."""
RAY = {"run__engine": "ray", **SLOW}

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
STORE_BYTES = 80 * 2**20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A node with room for two workers; RAY_ADDRESS names it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 4, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def workers_of(node):
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for children in Path(f"/proc/{raylet}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a process ended meanwhile
            pids = map(int, children.read_text().split())
            found += [pid for pid in pids if "::RayWorker" in Path(f"/proc/{pid}/cmdline").read_text()]
    return found


def is_writing(worker):
    """Return whether the worker has a shard's scratch file open."""
    with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile: a stop takes a moment
        return any(str(link.readlink()).endswith(".partial") for link in Path(f"/proc/{worker}/fd").iterdir())
    return False


def send(number, worker):
    with suppress(ProcessLookupError):  # Ray has ended the worker
        os.kill(worker, number)


def kill_a_writing_worker(node):
    """Kill one of two workers if it is in the middle of a shard; return whether it was."""
    for worker in workers if len(workers := workers_of(node)) == 2 else []:
        send(signal.SIGSTOP, worker)
        found = is_writing(worker)
        send(signal.SIGKILL if found else signal.SIGCONT, worker)
        if found:
            return True
    return False


def disturb(cluster, cache):
    """Kill a worker; add a node, and let it alone commit shards for a while."""
    wait_for(lambda: kill_a_writing_worker(cluster.head_node))
    stopped = set()

    def commits_beside_stopped():
        for worker in {*workers_of(cluster.head_node)} - stopped:
            send(signal.SIGSTOP, worker)
            stopped.add(worker)
        return len(list(cache.glob("commits/*.json")))

    before = commits_beside_stopped()
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    wait_for(lambda: commits_beside_stopped() > before + 1)
    assert workers_of(node)
    for worker in stopped:
        send(signal.SIGCONT, worker)


@pytest.mark.slow
def test_a_killed_worker_and_a_new_node_change_no_byte(project, cluster):
    build = start_build(project.config(**RAY))
    disturb(cluster, project.cache)
    _, error = build.communicate(timeout=300)
    assert build.returncode == 0, error
    assert "Task RayWorker.build failed. There are 2 retries remaining" in error
    assert f"{SAMPLES}/{SAMPLES} " in error, "images of the lost shard count once"
    project.build(name="local", **SLOW)
    assert project.files() == timeless_files(project.folder / "local")


class Poison:
    """An own encoder whose process dies at a batch of three, the last one of each shard here."""

    identity = "poison"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def layout(self, size: Size) -> dict[str, int]:
        return {"channel": 3, "latent_y": size.height // 8, "latent_x": size.width // 8}

    def encode(self, pixels_N3TYX: torch.Tensor) -> torch.Tensor:
        if len(pixels_N3TYX) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.avg_pool2d(pixels_N3TYX[:, :, 0], 8)


@pytest.mark.slow
def test_a_shard_that_kills_its_worker_again_and_again_ends_the_build(project, cluster):
    project.vae, one = f"{__name__}:Poison", {"run__workers": 1, "store__samples_per_shard": 11}
    build = start_build(project.config(run__engine="ray", encoder__batch_size=4, **one))
    _, error = build.communicate(timeout=300)
    assert build.returncode == 1, error
    assert "a worker on Ray was lost 3 times with shard 0 in hand: " in error
    assert "Traceback" not in error


class Reporting(RayWorker):
    """A worker of no encoder: three reports for a shard, the last one that it does not match."""

    def _run(self, job):
        for run in self._inbox.runs():
            for shard in run:
                last = MismatchedShard(shard=shard, digest="", samples=pa.table({}))
                reports = [Progress(shard, samples=4), Progress(shard), Progress(shard, mismatched=last)]
                for report in reports:
                    self._report(report)


def test_a_call_that_ray_repeats_yields_the_same_reports():
    """Ray repeats a call if the connection to a living actor was lost for a moment."""
    worker = Reporting(None)
    first = worker.build(7)
    assert [(report.shard, report.samples, report.ends_shard) for report in first] == [
        (7, 4, False),
        (7, 0, False),
        (7, 0, True),
    ]
    assert worker.build(7) == first
    worker.drop()
    STOP_REQUEST.clear()


def test_a_stop_ends_the_build_and_a_rerun_by_another_engine_goes_on(project, cluster):
    build = start_build(project.config(**RAY, run__workers=1))
    wait_for(lambda: list(project.cache.glob("commits/*.json")))
    os.killpg(build.pid, signal.SIGTERM)
    _, error = build.communicate(timeout=300)
    assert build.returncode == 3, error
    assert not {"Traceback", "leaked"} & {*error.split()}
    assert not (project.cache / "seal.json").exists(), "the build was not stopped"
    project.build(**SLOW)
    project.assert_as_built(**SLOW)


@pytest.mark.slow
def test_a_node_that_does_not_see_the_plan_is_named(built, cluster):
    """A worker's error is raised in its own words."""
    config = replace(BuildConfig.of_cache(built.cache), run=RunConfig(engine="ray", workers=1))
    job = EncodeJob(
        config=config, store=LocalStore(built.folder / "elsewhere"), spec=read_spec(built.cache), shards=[0, 1]
    )
    message = rf"node {os.uname().nodename} does not see the plan at {built.folder}/elsewhere/plan; on Ray"
    with built.untouched(), pytest.raises(CacheError, match=message):
        run_on_ray(job, lambda _: None)


@pytest.mark.parametrize(
    ("address", "code", "named"),
    [
        ("127.0.0.1:1", 1, "refused"),
        ("", 2, "HOST:PORT auto"),
    ],
)
def test_an_address_that_no_build_can_use_is_refused_before_it_plans(project, monkeypatch, address, code, named):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert_names(project.build(code=code, run__engine="ray"), f"RAY_ADDRESS {address} {named}")
    assert not project.cache.exists()


def test_a_missing_ray_is_named_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"run.engine: ray is not installed; run `pip install 'encode-once\[ray\]'`"):
        RunConfig(engine="ray")


def test_ray_accepts_our_cluster_file():
    schema = Path(importlib.import_module("ray").__file__).parent / "autoscaler/ray-schema.json"
    jsonschema = importlib.import_module("jsonschema")
    jsonschema.validate(yaml.safe_load(Path("configs/ray/cluster.yaml").read_text()), json.loads(schema.read_text()))
