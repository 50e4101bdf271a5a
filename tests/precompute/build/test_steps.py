"""Plan, ranks and seal: whatever ranks do to each other and whatever is done to them, the bytes are a build's."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.metadata import read_seal
from cache_store.storage.local import LocalStore
from precompute.cli import main
from tests.precompute.conftest import BROKEN, GOOD, SAMPLES, image_bytes, places, sample_name, timeless_files
from tests.precompute.encode.engines.test_local import wait_for

MANY = {"store__samples_per_shard": 1}
"""Shards, so that there is time to do something to a rank."""


def step(project, command, *flags, code=0, **overrides):
    return project.run(main, command, "--config", project.config(**overrides), *flags, code=code)


def rank(index, world_size):
    return ["--rank", str(index), "--world-size", str(world_size)]


def start(project, index, world_size, **overrides):
    config = str(project.config(run__workers=1, **overrides))
    command = [sys.executable, "-m", "precompute", "build", "--config", config, *rank(index, world_size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return said


def records(project, index=0, world_size=1):
    """Shards of a rank that are committed."""
    shards = (int(path.stem) for path in project.cache.glob("commits/*.json"))
    return {shard for shard in shards if shard % world_size == index}


@contextmanager
def unchanged(project):
    """But for the claim that ranks share, which stays until the seal."""
    before = places(project.cache)
    yield
    assert {name: place for name, place in places(project.cache).items() if name != ".claim"} == before


def assert_as_built(project, **overrides):
    project.build(name="alone", **overrides)
    assert project.files() == timeless_files(project.folder / "alone")


def test_two_ranks_at_once_write_the_bytes_of_one_build(project):
    """Also those that both take."""
    assert "22 samples in 22 shards" in step(project, "plan", **MANY)
    first, twin, second = (start(project, index, 2, **MANY) for index in (0, 0, 1))
    said = ended(second)
    assert "rank 1 of 2 encoded 11 images in 11 shards" in said
    assert f"next, once every rank has ended: precompute seal --config {project.folder / 'cache.yaml'}" in said
    assert ended(first).startswith("rank 0 of 2")
    assert ended(twin).startswith("rank 0 of 2")
    assert "22 planned = 20 cached + 2 rejected (2 cannot decode)" in step(project, "seal", **MANY)
    with unchanged(project):
        assert "encode: 100%" not in step(project, "seal", **MANY)
        step(project, "plan", **MANY)
        assert "rank 0 of 2: nothing to encode" in step(project, "build", *rank(0, 2), **MANY)
        project.build(**MANY)
    assert_as_built(project, **MANY)


def test_a_killed_rank_is_run_again_as_one_of_three(project):
    step(project, "plan", **MANY)
    first, second = (start(project, index, 2, **MANY) for index in (0, 1))
    wait_for(lambda: records(project, 1, 2))
    second.kill()
    second.communicate()
    ended(first)
    assert records(project, 0, 2) == {*range(0, SAMPLES, 2)}
    missing = sorted({*range(SAMPLES)} - records(project))
    assert missing, "it was killed too late"
    said = step(project, "seal", code=1, **MANY)
    assert f"is not sealed: {len(missing)} of 22 shards are not committed: {missing[0]}" in said
    for process in [start(project, index, 3, **MANY) for index in range(3)]:
        ended(process)
    step(project, "seal", **MANY)
    assert_as_built(project, **MANY)


def test_a_build_alone_ends_what_ranks_began(built):
    """And ranks end what a build began that was stopped."""
    built.lose("seal.json", "commits/000000.json", "commits/000002.json")
    step(built, "build", *rank(0, 3))
    (built.cache / ".claim").unlink()
    with unchanged(built):
        assert "nothing to encode" in step(built, "build", *rank(1, 3))
        assert "1 of 3 shards are not committed: 2; run their ranks again" in step(built, "seal", code=1)
    built.build()
    assert_as_built(built)


@pytest.mark.parametrize("flag", ["--extend", "--retry-rejected"])
def test_a_plan_made_anew_gives_ranks_what_a_build_would_do(built, built_once, flag):
    if flag == "--extend":
        built.has(range(SAMPLES + 9))
    else:
        built.has(**{sample_name(BROKEN[0]).replace("-", "_"): image_bytes(BROKEN[0])})
    message = f"{flag} is for `precompute plan`, before its ranks build; this is rank 1 of 2"
    with unchanged(built):
        assert message in step(built, "build", flag, *rank(1, 2), code=2)
    step(built, "plan", flag)
    assert not (built.cache / "seal.json").exists()
    for index in range(2):
        step(built, "build", *rank(index, 2))
    step(built, "seal")
    shutil.copytree(built_once, built.folder / "alone")
    built.build(flag, name="alone")
    assert built.files().keys() == timeless_files(built.folder / "alone").keys()
    assert read_seal(built.cache) == read_seal(built.folder / "alone")


def test_ranks_and_seal_name_the_plan_that_is_missing(project):
    plan = f"has no plan; first run: precompute plan --config {project.folder / 'cache.yaml'} --run.workers 1"
    for command, flags in (("build", rank(0, 2)), ("seal", [])):
        assert plan in step(project, command, *flags, "--run.workers", "1", code=2)
    assert not project.cache.exists()
    step(project, "plan")
    (project.cache / "build.json").unlink()
    assert "is not planned to the end (" in step(project, "build", *rank(0, 2), code=1)


@pytest.mark.parametrize("damage", ["commits/000001.json", "latents/c/1/0/0/0"])
def test_what_was_sealed_is_mended_by_a_build_alone(built, damage):
    alone = f"first run: precompute build --config {built.folder / 'cache.yaml'} --rank 0 --world-size 1"
    with built.same_in_the_end():
        built.lose(damage)
        with unchanged(built):
            for command, flags in (("plan", []), ("build", rank(0, 2)), ("seal", [])):
                said = step(built, command, *flags, code=1)
                assert "lost or damaged: 1 shard (1), which only a build alone mends" in said
                assert alone in said
        step(built, "build", *rank(0, 1))


def test_other_inputs_are_refused_to_ranks_as_to_a_build(built):
    with unchanged(built):
        for command, flags in (("plan", []), ("build", rank(0, 2)), ("seal", [])):
            assert "image.height" in step(built, command, *flags, code=1, image__height=40)
        built.has(GOOD)
        assert "was planned from another sample list" in step(built, "build", *rank(0, 2), code=1)


def test_too_many_rejected_of_all_ranks_are_not_sealed(project):
    few = {"run__max_reject_fraction": 0.05}
    step(project, "plan", **few)
    step(project, "build", *rank(0, 2), **few)
    said = step(project, "build", *rank(1, 2), code=1, **few)
    assert "2 of 22 samples are rejected" in said
    assert "--retry-rejected" in said
    assert "2 of 22 samples are rejected" in step(project, "seal", code=1, **few)
    step(project, "seal")


def test_ranks_work_beside_each_other_and_beside_nothing_else(built):
    holder = f"is being written by ranks of a build, the last to start as process {os.getpid()} on "
    store = LocalStore(built.cache)
    with store.claim(shared=True), store.claim(shared=True):
        step(built, "build", *rank(0, 2))
        for message in (built.build(code=1), built.repair("--shards", "0", code=1), step(built, "seal", code=1)):
            assert holder in message
    with store.claim():
        assert f"is being written by process {os.getpid()} on " in step(built, "build", *rank(0, 2), code=1)
    step(built, "seal")
    assert not (built.cache / ".claim").exists()


def write_tars(folder):
    """Three of them, in WebDataset's form."""
    folder.mkdir()
    for number in range(3):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            for sample in range(number, SAMPLES, 3):
                data = b"no image" if sample in BROKEN else image_bytes(sample)
                info = tarfile.TarInfo(f"{sample:09d}.png")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return {"kind": "webdataset", "path": str(folder)}


def write_parquet(folder):
    """Two files."""
    folder.mkdir()
    for number in range(2):
        images = [image_bytes(sample) for sample in range(number, SAMPLES, 2)]
        pq.write_table(pa.table({"image": images}), folder / f"train-{number}.parquet")
    return {"kind": "parquet", "path": str(folder)}


SOURCES = {
    "webdataset": lambda built: write_tars(built.folder / "tars"),
    "parquet": lambda built: write_parquet(built.folder / "tables"),
    "cache": lambda built: {"kind": "cache", "path": str(built.cache)},
}
"""The others are lists and folders, whose ranks are above."""


@pytest.mark.parametrize("kind", SOURCES)
def test_ranks_of_any_source_write_what_one_build_does(built, kind):
    """Each rank lists the source itself."""
    built.settings = {"source": SOURCES[kind](built), "image__flip": True}
    built.cache = built.folder / "ranks"
    step(built, "plan")
    for index in (1, 0):
        assert f"rank {index} of 2 encoded" in step(built, "build", *rank(index, 2))
    step(built, "seal")
    assert_as_built(built)
