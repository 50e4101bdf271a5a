"""Samples that were withdrawn stay withdrawn, whatever is built, and may be gone from the source."""

import json
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import open_plan, read_build, read_samples, read_spec, write_build
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import BROKEN, SAMPLES, Project, sample_name

GONE = (2, BROKEN[0], 9)
"""Numbers of the withdrawn samples; the last shard, of three, has none."""
LEFT = [number for number in range(SAMPLES) if number not in GONE]


def withdraw(project: Project, *numbers: int) -> str:
    ids = project.folder / "ids.txt"
    ids.write_text("\n".join(map(sample_name, numbers)))
    return project.run(cache_store, "withdraw", project.cache, "--ids", ids)


@pytest.fixture
def withdrawn(built: Project) -> Project:
    """A built project, whose source still has the images and captions of the withdrawn samples."""
    said = withdraw(built, *GONE)
    assert "withdrawn 3 samples, rewritten 2 shards" in said
    return built


def assert_withdrawn(cache: Path) -> None:
    tables = [read_samples(cache, shard).to_pylist() for shard in range(read_spec(cache).num_shards)]
    reasons = {row["row"]: (row["reason"], row["content_sha256"]) for table in tables for row in table}
    assert all(reasons[number] == ("withdrawn", None) for number in GONE)
    text = json.dumps(open_plan(cache).part_rows(0).to_pylist())
    assert [number for number in range(SAMPLES) if f"Picture {number}." in text] == LEFT
    assert not verify(cache, "deep").findings


def test_a_lost_plan_is_not_made_again_from_the_source(withdrawn):
    plan = withdrawn.place.read("plan/000000.parquet")
    withdrawn.lose("plan/000000.parquet")
    with withdrawn.untouched():
        assert f"{withdrawn.cache}/plan " in withdrawn.repair(code=1)
    withdrawn.place.put("plan/000000.parquet", plan)
    withdrawn.repair()
    assert_withdrawn(withdrawn.cache)


def test_a_set_with_additions_and_deletions_grows(built):
    """The refusal of a list without some samples names the command."""
    built.has([*LEFT, *range(SAMPLES, SAMPLES + 2)])
    for flags in ([], ["--extend"]):
        said = built.build(*flags, code=1)
        assert f"cache-store withdraw {built.cache} --ids FILE" in said
        assert "gone sample" in said
    withdraw(built, *GONE)
    assert "--extend" in built.build(code=1)
    assert "extending from 22 to 24 samples; 3 shards kept" in built.build("--extend")
    assert_withdrawn(built.cache)
    withdraw(built, *GONE, 22)
    built.has([number for number in range(SAMPLES + 4) if number not in (*GONE, 22)])
    built.build("--extend")
    cache = open_cache(built.cache)
    assert (len(cache), cache.seal.reasons) == (21, {"cannot decode": 1, "withdrawn": 4})
    assert_withdrawn(built.cache)


def test_a_new_cache_of_the_plan_has_them_withdrawn_too(withdrawn):
    """It reads no image of theirs, and joins."""
    source = {"kind": "cache", "path": str(withdrawn.cache)}
    withdrawn.build(name="small", source=source, image__height=16)
    small = withdrawn.folder / "small"
    assert_withdrawn(small)
    joined = open_joined({"one": withdrawn.cache, "small": small})
    rows = joined.samples(np.arange(len(joined)), ["row"])["row"].to_pylist()
    assert rows == [number for number in LEFT if number not in BROKEN]


def test_a_stopped_withdrawal_is_finished_by_a_build_and_refused_by_ranks(built):
    build = read_build(built.cache)
    write_build(built.cache, build.config, build.listed, [sample_name(number) for number in GONE])
    config = ("--config", built.config())
    said = built.run(main, "build", *config, "--rank", "0", "--world-size", "2", code=1)
    assert "a withdrawal was stopped" in said
    assert "precompute plan" in said
    said = built.build()
    assert "a withdrawal of 3 samples was stopped; finishing it" in said
    assert_withdrawn(built.cache)
