"""Same inputs give the same bytes: with any workers and ranks, in any place, and after conversions and copies."""

import itertools
import shlex
import signal

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cache_store import open_cache
from cache_store.cache.metadata import read_build
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from tests.command_runs import records
from tests.places import Folder
from tests.precompute.conftest import GOOD, SAMPLES, sample_name
from trainer import LatentStream

MANY = {"store__samples_per_shard": 1, "run__workers": 1}
"""Many shards, so that ranks run at the same time and can be killed."""


def test_planned_samples_are_cached_or_rejected_with_reasons(project):
    """The cache records its config; a rerun finds nothing to do."""
    said = project.build()
    assert "22 planned = 20 cached + 2 rejected (2 cannot decode)" in said
    assert f"next: cache-store verify {shlex.quote(project.place.address)} --level full" in said
    cache = open_cache(project.place.address)
    assert (cache.seal.spec.rows, cache.seal.cached, cache.seal.rejected) == (22, 20, 2)
    ids = cache.samples(np.arange(len(cache)), ["id"])["id"].to_pylist()
    assert ids == [sample_name(number) for number in GOOD]
    assert not verify(project.place.address, "deep").findings
    expected = {"build.json", "commits", "latents", "plan", "rejected.parquet", "samples", "seal.json", "shards.bin"}
    expected |= {"texts", "texts.json", "zarr.json"}
    assert {name.split("/")[0] for name in project.place.files()} == expected
    config = read_build(project.place.address).config
    assert config["encoder"]["model"] == str(project.vae)
    assert "run" not in config
    with project.untouched():
        assert "nothing to encode" in project.build()
        assert f"cache           {project.place.address}\n" in project.run(cache_store, "info", project.place.address)


# Ranks.


def rank(project, index, world_size):
    config = str(project.config(**MANY))
    return ["precompute", "build", "--config", config, "--rank", str(index), "--world-size", str(world_size)]


def at_once(start, project, *ranks, world_size):
    # All command lines first: each writes the config that ranks read.
    return [start(*line) for line in [rank(project, index, world_size) for index in ranks]]


def ended(program):
    code, said = program.end()
    assert code == 0, said
    return said


def test_two_ranks_at_once_write_the_bytes_of_one_build(project, start):
    """Even if two processes have the same rank."""
    assert "22 samples in 22 shards" in project.step("plan", **MANY)
    first, twin, second = at_once(start, project, 0, 0, 1, world_size=2)
    said = ended(second)
    assert "rank 1 of 2 encoded 11 images in 11 shards" in said
    assert f"next, when all ranks have finished: precompute seal --config {project.folder / 'cache.yaml'}" in said
    assert "\nrank 0 of 2" in ended(first)
    assert "\nrank 0 of 2" in ended(twin)
    assert "22 planned = 20 cached + 2 rejected (2 cannot decode)" in project.step("seal", **MANY)
    with project.unchanged():
        project.step("seal", **MANY)
        project.step("plan", **MANY)
        assert "rank 0 of 2: nothing to encode" in project.step("build", *rank(project, 0, 2)[4:], **MANY)
        project.build(**MANY)
    project.assert_as_built(**MANY)


def test_a_killed_rank_is_run_again_as_one_of_three(project, start, dying):
    project.step("plan", **MANY)
    second = dying(*rank(project, 1, 2), "--cache", project.place.address, at=20)
    first = start(*rank(project, 0, 2))
    assert second.end()[0] == -signal.SIGKILL
    ended(first)
    committed = records(project.place)
    assert {*committed} >= {*range(0, SAMPLES, 2)}
    missing = sorted({*range(SAMPLES)} - {*committed})
    said = project.step("seal", code=1, **MANY)
    assert f"is not sealed: {len(missing)} of 22 shards not committed: {missing[0]}" in said
    for program in at_once(start, project, 0, 1, 2, world_size=3):
        ended(program)
    project.step("seal", **MANY)
    project.assert_as_built(**MANY)


# Other forms, other places, and what is read of them.

FORMS = ["zarr", "webdataset"]
ELSEWHERE = ["another of its kind", "a folder"]


@pytest.fixture(params=ELSEWHERE)
def elsewhere(request, caches, tmp_path):
    return caches.below("elsewhere") if request.param == ELSEWHERE[0] else Folder(tmp_path / "elsewhere")


@pytest.mark.parametrize("form", FORMS)
def test_copies_have_the_bytes_of_built_caches_also_in_another_form(scenes, caches, elsewhere, run, form):
    """From and to any place; run again, they go on where they were; copied back, they have their first bytes."""
    here, same, changed = caches.below("cache"), elsewhere.below("same"), elsewhere.below("changed")
    cache, (other,) = Folder(scenes(form) / "before"), {*FORMS} - {form}
    here.mirror(cache)
    assert "copied 2 shards" in run("cache-store", "copy", here.address, same.address)
    assert same.files() == cache.files()
    same.lose("seal.json", "commits/000001.json")
    same.put("samples/000000.parquet", b"damage")
    assert "copied 2 shards" in run("cache-store", "copy", here.address, same.address)
    assert same.files() == cache.files()
    built = Folder(scenes(other) / "before").timeless() | {"build.json": b""}
    run("cache-store", "copy", here.address, changed.address, "--format", other)
    assert changed.timeless() | {"build.json": b""} == built
    run("cache-store", "copy", changed.address, caches.below("back").address, "--format", form)
    assert caches.below("back").timeless() == here.timeless()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_and_batches_are_the_same_wherever_they_lie(scenes, caches, workers):
    """Also in a DataLoader's worker."""
    caches.mirror(Folder(scenes("zarr") / "before"))
    here, there = open_cache(scenes("zarr") / "before"), open_cache(caches.address)
    numbers = np.array([3, 0, 1, 1])
    assert here.identity == there.identity
    np.testing.assert_array_equal(here.read(numbers), there.read(numbers))
    assert here.samples(numbers) == there.samples(numbers)
    for block in (2,) if workers else (1, 2):
        options = {"batch_size": 3, "seed": 1, "epochs": 2, "shuffle_block": block}
        expected, found = (LatentStream(cache, **options) for cache in (here, there))
        loader = DataLoader(found, None, num_workers=workers, multiprocessing_context="spawn" if workers else None)
        batches = itertools.zip_longest(expected, loader)
        for one, other in batches:
            assert all((one[name] == other[name]).all() for name in ("latents", "numbers"))
