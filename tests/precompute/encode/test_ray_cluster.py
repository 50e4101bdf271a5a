"""Ray clusters that no build can use: each is named at once, in one line."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from cache_store.errors import ConfigError, EncodeOnceError
from precompute.config import RunConfig
from precompute.encode.ray_actors import connected, say_waiting

pytest.importorskip("ray", reason="needs the extra ray")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1 \(.*refused\)"),
        ("http://127.0.0.1:8265", "no actors at such an address; run the build in the cluster, by `ray job submit`"),
        ("nowhere", "RAY_ADDRESS is nowhere; expected HOST:PORT, or auto"),
    ],
)
def test_an_address_that_no_build_can_use_is_refused_at_once(monkeypatch, address, message):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EncodeOnceError, match=message), connected(2):
        pass


def test_a_build_looks_for_its_cluster_before_it_plans(project, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1" in project.build(code=1, run__engine="ray")
    assert not project.cache.exists()


@pytest.mark.parametrize(
    ("gpus", "cores", "said"),
    [
        (0, 2, "on 2 CPUs; the Ray cluster has 2 CPUs and 0 GPUs, perhaps in use"),
        (0, 0, "on 2 CPUs; the Ray cluster has 0 CPUs and 0 GPUs, too few"),
        (1, 9, "on 1 GPU; the Ray cluster has 9 CPUs and 0 GPUs, too few"),
    ],
)
def test_a_waiting_build_says_if_its_cluster_is_too_small(logged, gpus, cores, said):
    say_waiting({"num_gpus": gpus, "num_cpus": 0 if gpus else 2}, {"CPU": cores, "GPU": 0})
    assert said in logged.text


def test_a_missing_ray_is_named_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"run.engine: ray is not installed; run `pip install 'encode-once\[ray\]'`"):
        RunConfig(engine="ray")


def test_ray_accepts_our_cluster_file():
    schema = Path(importlib.import_module("ray").__file__).parent / "autoscaler/ray-schema.json"
    jsonschema = importlib.import_module("jsonschema")
    jsonschema.validate(yaml.safe_load(Path("configs/ray/cluster.yaml").read_text()), json.loads(schema.read_text()))
