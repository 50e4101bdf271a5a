"""Plan, ranks and seal: whatever ranks do to each other and whatever is done to them, the bytes are a build's."""

import io
import os
import shutil
import tarfile
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.metadata import read_seal
from cache_store.storage.local import LocalStore
from precompute.cli import main
from tests.precompute.conftest import BROKEN, SAMPLES, image_bytes, places, sample_name, timeless_files


def step(project, command, *flags, code=0, **overrides):
    return project.run(main, command, "--config", project.config(**overrides), *flags, code=code)


def rank(index, world_size):
    return ["--rank", str(index), "--world-size", str(world_size)]


@contextmanager
def unchanged(project):
    """But for the claim that ranks share, which stays until the seal."""
    before = places(project.cache)
    yield
    assert {name: place for name, place in places(project.cache).items() if name != ".claim"} == before


def assert_as_built(project, **overrides):
    project.build(name="alone", **overrides)
    assert project.files() == timeless_files(project.folder / "alone")


def test_a_build_alone_ends_what_ranks_began(built):
    """And ranks end what a build began that was stopped."""
    built.lose("seal.json", "commits/000000.json", "commits/000002.json")
    assert "| 8/8 [" in step(built, "build", *rank(0, 3)), "the images of others are not in its bar"
    (built.cache / ".claim").unlink()
    with unchanged(built):
        assert "nothing to encode" in step(built, "build", *rank(1, 3))
        assert "1 of 3 shards not committed: 2; run their ranks again" in step(built, "seal", code=1)
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


def test_ray_which_finds_its_own_workers_is_refused_to_ranks(built, monkeypatch):
    pytest.importorskip("ray")
    ray = {"run__engine": "ray"}
    with unchanged(built):
        assert "run.engine ray is not for rank 0 of 2, " in step(built, "build", *rank(0, 2), code=2, **ray)
        for name, value in {"STEP_ID": 0, "PROCID": 1, "NTASKS": 2}.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        assert "run.engine ray is not for rank 1 of 2, " in step(built, "build", code=2, **ray)


def test_ranks_and_seal_name_the_plan_that_is_missing(project):
    plan = f"has no plan; first run: precompute plan --config {project.folder / 'cache.yaml'} --run.workers 1"
    for command, flags in (("build", rank(0, 2)), ("seal", [])):
        assert plan in step(project, command, *flags, "--run.workers", "1", code=2)
    assert not project.cache.exists()
    step(project, "plan")
    (project.cache / "build.json").unlink()
    assert "planning has not finished (" in step(project, "build", *rank(0, 2), code=1)


@pytest.mark.parametrize("damage", ["commits/000001.json", "latents/c/1/0/0/0"])
def test_what_was_sealed_is_mended_by_a_build_alone(built, damage):
    alone = f"; run: precompute build --config {built.folder / 'cache.yaml'} --rank 0 --world-size 1"
    with built.same_in_the_end():
        built.lose(damage)
        with unchanged(built):
            for command, flags in (("plan", []), ("build", rank(0, 2)), ("seal", [])):
                said = step(built, command, *flags, code=1)
                assert "1 shard (1) lost or damaged; only a single-process build mends them" in said
                assert alone in said
        step(built, "build", *rank(0, 1))


def test_other_inputs_are_refused_to_ranks_as_to_a_build(built):
    with unchanged(built):
        for command, flags in (("plan", []), ("build", rank(0, 2)), ("seal", [])):
            assert "image.height" in step(built, command, *flags, code=1, image__height=40)


def test_the_list_is_read_for_the_plan_alone(project):
    """What comes after it is for another plan: a hundred ranks do not list a hundred million samples each."""
    step(project, "plan")
    project.build(name="alone")
    project.has(range(SAMPLES + 9))
    with unchanged(project):
        assert "was planned from fewer samples than the source has now" in step(project, "plan", code=1)
    for index in range(2):
        step(project, "build", *rank(index, 2))
    step(project, "seal")
    assert project.files() == timeless_files(project.folder / "alone")


def test_a_damaged_plan_is_not_sealed(project):
    """Ranks read the rows of their own shards alone; whoever seals reads them all."""
    step(project, "plan")
    plan = project.cache / "plan.parquet"
    whole, rows = plan.read_bytes(), pq.read_table(plan)
    for damage in (lambda: plan.write_bytes(whole[:-9]), plan.unlink):
        damage()
        for command, flags in (("build", rank(0, 2)), ("seal", [])):
            assert "planning has not finished" in step(project, command, *flags, code=1)
        step(project, "plan")
        assert plan.read_bytes() == whole
    pq.write_table(rows.set_column(2, "uri", rows["uri"][::-1]), plan, 8)
    for index in range(2):
        step(project, "build", *rank(index, 2))
    assert "planning has not finished" in step(project, "seal", code=1)


def test_too_many_rejected_of_all_ranks_are_not_sealed(project):
    few = {"run__max_reject_fraction": 0.05}
    step(project, "plan", **few)
    step(project, "build", *rank(0, 2), **few)
    said = step(project, "build", *rank(1, 2), code=1, **few)
    assert "2 of 22 samples rejected" in said
    assert "--retry-rejected" in said
    assert "2 of 22 samples rejected" in step(project, "seal", code=1, **few)
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
    built.settings = {"source": SOURCES[kind](built), "image__flip": True}
    built.cache = built.folder / "ranks"
    step(built, "plan")
    for index in (1, 0):
        assert f"rank {index} of 2 encoded" in step(built, "build", *rank(index, 2))
    step(built, "seal")
    assert_as_built(built)
