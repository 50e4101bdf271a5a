"""Plan, ranks and seal: whatever happens to ranks, the bytes are those of one build."""

import json
import os
import shutil

import pytest

from cache_store.cache.metadata import read_seal
from cache_store.storage.local import LocalStore
from precompute.cli import main
from tests.precompute.conftest import BROKEN, SAMPLES, image_bytes, sample_name, timeless_files


def rank(index, world_size):
    return ["--rank", str(index), "--world-size", str(world_size)]


@pytest.mark.parametrize("flag", ["--extend", "--retry-rejected"])
def test_a_plan_made_anew_gives_ranks_what_a_build_would_do(built, built_once, flag):
    if flag == "--extend":
        built.has(range(SAMPLES + 9))
    else:
        built.has(**{sample_name(BROKEN[0]).replace("-", "_"): image_bytes(BROKEN[0])})
    built.step("plan", flag)
    assert not (built.cache / "seal.json").exists()
    for index in range(2):
        built.step("build", *rank(index, 2))
    built.step("seal")
    shutil.copytree(built_once, built.folder / "alone")
    built.build(flag, name="alone")
    assert built.files().keys() == timeless_files(built.folder / "alone").keys()
    assert read_seal(built.cache) == read_seal(built.folder / "alone")


def test_the_list_is_read_for_the_plan_alone(project):
    """Ranks ignore what the source gains later: a hundred ranks must not list a hundred million samples each."""
    project.step("plan")
    project.build(name="alone")
    project.has(range(SAMPLES + 9))
    with project.unchanged():
        assert sample_name(SAMPLES) in project.step("plan", code=1)
    for index in range(2):
        project.step("build", *rank(index, 2))
    project.step("seal")
    assert project.files() == timeless_files(project.folder / "alone")


def test_too_many_rejected_of_all_ranks_are_not_sealed(project):
    few = {"run__max_reject_fraction": 0.05}
    project.step("plan", **few)
    project.step("build", *rank(0, 2), **few)
    project.step("build", *rank(1, 2), **few)
    said = project.step("seal", code=1, **few)
    assert "2 of 22" in said
    assert "--retry-rejected" in said
    project.step("seal")


def test_ranks_work_beside_each_other_and_beside_nothing_else(built):
    holder = f"process {os.getpid()}"
    store = LocalStore(built.cache)
    with store.claim(shared=True), store.claim(shared=True):
        built.step("build", *rank(0, 2))
        for message in (built.build(code=1), built.repair("--shards", "0", code=1), built.step("seal", code=1)):
            assert holder in message
    with store.claim():
        assert holder in built.step("build", *rank(0, 2), code=1)
    built.step("seal")
    assert not (built.cache / ".claim").exists()


def test_the_log_of_ranks_and_builds_says_who_does_what(built, logging_as_before):
    """As JSON: cache, host and rank of every message; progress and the build's counts as numbers."""
    built.run(main, "plan", "--config", built.config("logged"))
    said = built.run(main, "build", "--config", built.config("logged"), *rank(0, 2), "--log-format", "json")
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {(each["rank"], each["world_size"], each["host"]) for each in records} == {(0, 2, os.uname().nodename)}
    (build,) = (each["build"] for each in records if "build" in each)
    assert build["images"] > 0
    progress = [each["progress"] for each in records if "progress" in each]
    assert progress[-1].keys() >= {"per_s", "seconds_left", "rejected"}
