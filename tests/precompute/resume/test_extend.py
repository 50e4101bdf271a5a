"""`precompute build --extend`: a cache takes new samples in, and keeps what it has."""

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.files import read_plan
from cache_store.cache.metadata import read_build, read_spec
from cache_store.verify.verify import verify
from tests.precompute.conftest import Project, places, sample_name, timeless_files

SHORT, LONG = range(12), range(22)
"""Samples, in shards of 8: the short list fills one and a half."""


def extended(project: Project, *lists: range, **overrides: object) -> str:
    """Build of the first list and extend by the others; what the last extension said."""
    project.has(lists[0])
    said = project.build(**overrides)
    for numbers in lists[1:]:
        project.has(numbers)
        said = project.build("--extend", **overrides)
        assert read_spec(project.cache).rows == len(numbers)
    return said


@pytest.mark.parametrize(
    ("store_format", "lists"),
    [("zarr", [SHORT, LONG]), ("webdataset", [SHORT, LONG]), ("zarr", [SHORT, range(15), LONG])],
)
def test_an_extended_cache_is_the_cache_of_the_long_list(project, store_format, lists):
    """New ids that sort last: the same bytes, seal and identity as a build of the long list at once."""
    extended(project, *lists, store__format=store_format)
    project.build(name="whole", store__format=store_format)
    assert timeless_files(project.folder / "whole") == project.files()
    assert not verify(project.cache, "full").findings


def test_an_unsealed_cache_is_extended_and_finished(built):
    with built.same_in_the_end():
        built.cache.rename(built.folder / "whole")
        extended(built, SHORT)
        built.lose("seal.json", "commits/000000.json")
        built.has(LONG)
        built.build("--extend")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (SHORT, "12 to 22 samples; shards [0, 1) are full and kept; shard 1, partly filled so far, is written again"),
        (range(16), "from 16 to 22 samples; shards [0, 2) are full and kept"),
    ],
)
def test_full_shards_are_kept_and_an_open_one_is_no_damage(project, first, said):
    extended(project, first)
    before = places(project.cache)
    project.has(LONG)
    message = project.build("--extend")
    assert said in message
    assert "damage" not in message
    after = places(project.cache)
    files = ("latents/c/{0}/0/0/0", "samples/{0:06d}.parquet", "commits/{0:06d}.json")
    full = {name.format(shard) for shard in range(len(first) // 8) for name in files}
    assert {name for name in before if after[name] == before[name]} == full | {"build.json"}


def test_rows_stay_where_they_are_when_new_ids_sort_first(project):
    """Though the plan is then not sorted by id, the cache is rerun, repaired and restored like any other."""
    extended(project, range(10, 22))
    kept = open_cache(project.cache).read(np.arange(7))
    project.has(LONG)
    project.build("--extend")
    ids = read_plan(project.cache)["id"].to_pylist()
    assert ids == [sample_name(number) for number in (*range(10, 22), *range(10))]
    np.testing.assert_array_equal(open_cache(project.cache).read(np.arange(7)), kept)
    with project.same_in_the_end():
        for flags in ([], ["--extend"], ["--check-sources"]):
            assert "nothing to encode" in project.build(*flags)
        shard = project.cache / "latents/c/1/0/0/0"
        shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
        project.repair("--report", project.report())
        for name in ("plan.parquet", "zarr.json", "seal.json"):
            project.lose(name)
            project.build()


def test_repair_leaves_new_samples_out_and_says_so(built):
    with built.same_in_the_end():
        built.has(range(32))
        assert "10 samples are new in the source" in built.repair("--shards", "[1]")


def test_the_cache_remembers_the_list_it_was_extended_from(project):
    extended(project, SHORT)
    project.has(LONG)
    longer = (project.source / "chat.json").rename(project.source / "longer.json")
    project.build("--extend", source__path=str(longer))
    assert read_build(project.cache).config["source"]["path"] == str(longer)
    project.repair("--shards", "[2]")


def test_a_list_too_long_for_any_cache_is_refused_at_once(built, monkeypatch):
    built.has(range(25))
    monkeypatch.setattr("cache_store.cache.metadata.MAX_SHARDS", 3)  # a real one too many is a million
    with built.untouched():
        message = built.build("--extend", code=2)
    assert "no cache can hold 25 samples of this size: 4 shards, more than 3" in message
