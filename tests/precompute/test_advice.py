"""The steps that verification names, taken in their order and to the letter, end in a sound cache."""

import json
import shlex
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_commit
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main as precompute
from tests.precompute.conftest import config_values, flip, timeless_files, write_config


@pytest.fixture
def cache(tmp_path: Path, source_path: Path, vae_path: Path) -> Path:
    """In a folder whose name needs quotes."""
    values = config_values(tmp_path / "my cache", source_path, vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "build.yaml", values))]) == 0
    return tmp_path / "my cache"


def unfinish(cache: Path, shard: int) -> None:
    """As a build leaves it that is killed: nothing of the shard, no seal."""
    names = (
        "seal.json",
        f"commits/{shard:06d}.json",
        f"samples/{shard:06d}.parquet",
        f"latents/c/{shard}/0/0/0",
    )
    for name in names:
        (cache / name).unlink()


def take_steps(cache: Path, tmp_path: Path) -> list[str]:
    """Verify, and do what it says; the first words of each step."""
    report = tmp_path / "my report.json"
    assert cache_store(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    steps = json.loads(report.read_text())["next"]
    for step in steps:
        if step.startswith("rerun the `precompute build`"):
            assert precompute(["build", "--config", str(tmp_path / "build.yaml")]) == 0
        else:
            assert precompute(shlex.split(step)[1:]) == 0
    return [" ".join(step.split()[:2]) for step in steps]


@pytest.mark.parametrize("name", ["latents/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"])
def test_damage_in_a_half_built_cache_is_mended_beside_what_is_missing(cache, tmp_path, name):
    before = timeless_files(cache)
    unfinish(cache, 2)
    flip(cache / name)
    assert take_steps(cache, tmp_path) == ["rerun the", "precompute repair"]
    assert timeless_files(cache) == before
    assert not verify(cache, "full").findings


def test_what_was_only_missing_is_built_once(cache, tmp_path):
    unfinish(cache, 2)
    flip(cache / "latents/c/1/0/0/0")
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    assert precompute(["build", "--config", str(tmp_path / "build.yaml")]) == 0
    built = read_commit(cache, 2)
    assert precompute(["repair", str(cache), "--report", str(report)]) == 0
    assert read_commit(cache, 2) == built
    assert not verify(cache, "full").findings


def test_a_half_built_cache_is_also_mended_by_the_repair_alone(cache, tmp_path):
    before = timeless_files(cache)
    unfinish(cache, 2)
    flip(cache / "latents/c/1/0/0/0")
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    assert precompute(["repair", str(cache), "--report", str(report)]) == 0
    assert timeless_files(cache) == before


@pytest.mark.parametrize(
    ("lost", "steps"),
    [
        (["seal.json"], ["precompute repair"]),
        (["build.json"], ["rerun the"]),
        (["build.json", "seal.json"], ["rerun the"]),
        (["build.json", "samples/000001.parquet"], ["rerun the", "precompute repair"]),
    ],
)
def test_what_is_lost_of_a_whole_cache_comes_back_by_the_steps_named(cache, tmp_path, lost, steps):
    before = timeless_files(cache)
    for name in lost:
        (cache / name).unlink()
    assert take_steps(cache, tmp_path) == steps
    assert timeless_files(cache) == before
