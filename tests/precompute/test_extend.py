"""`precompute build --extend`: a cache takes new samples in, and keeps what it has."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import read_seal, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.plan import read_plan
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import (
    config_values,
    image_bytes,
    sample_name,
    timeless_files,
    write_config,
    write_source,
)

SHORT, LONG = 12, 22
"""Samples, in shards of 8: the short list fills one and a half."""

SHARDS_OF_SHORT = {"latents/c/0/0/0/0", "samples/000000.parquet", "commits/000000.json"}
"""Files of the one full shard."""


@pytest.fixture
def build(tmp_path: Path, vae_path: Path):
    """Build from `source`, which changes as a user's does; returns the exit code."""

    def run(*flags: str, cache: str = "cache", **overrides: object) -> int:
        values = config_values(tmp_path / cache, tmp_path / "source", vae_path, **overrides)
        return main(["build", "--config", str(write_config(tmp_path / f"{cache}.yaml", values)), *flags])

    write_source(tmp_path / "source", range(SHORT))
    return run


def grow(folder: Path, numbers: range | list[int] = range(LONG)) -> None:
    write_source(folder / "source", numbers)


def places(cache: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file."""
    files = (path for path in cache.rglob("*") if path.is_file())
    return {path.relative_to(cache).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(files)}


@pytest.mark.parametrize("store_format", ["zarr", "webdataset"])
def test_an_extended_cache_is_the_cache_of_the_long_list(build, tmp_path, store_format):
    """New ids that sort last: the same bytes, seal and identity as a build of the long list at once."""
    assert build(store__format=store_format) == 0
    grow(tmp_path)
    assert build("--extend", store__format=store_format) == 0
    assert build(cache="whole", store__format=store_format) == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "whole")
    assert read_seal(tmp_path / "cache").identity == read_seal(tmp_path / "whole").identity
    assert not verify(tmp_path / "cache", "full").findings


def test_full_shards_are_not_touched_and_the_partly_filled_one_is_no_damage(build, tmp_path, capsys):
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path)
    capsys.readouterr()
    assert build("--extend") == 0
    after = places(tmp_path / "cache")
    assert {name for name in before if after[name] == before[name]} == SHARDS_OF_SHORT | {"build.json"}
    message = capsys.readouterr().err
    assert "from 12 to 22 samples; shards [0, 1) are full and kept; shard 1, partly filled so far, is" in message
    assert "damage" not in message


def test_a_full_last_shard_is_kept_too(build, tmp_path):
    grow(tmp_path, range(16))
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path)
    assert build("--extend") == 0
    after = places(tmp_path / "cache")
    shards = {name for name in before if name.startswith(("latents/c/", "samples/", "commits/"))}
    assert len(shards) == 6
    assert all(after[name] == before[name] for name in shards)
    assert not verify(tmp_path / "cache", "full").findings


def test_rows_stay_where_they_are_when_new_ids_sort_first(build, tmp_path):
    grow(tmp_path, range(10, LONG))
    assert build() == 0
    kept = open_cache(tmp_path / "cache").read(np.arange(8))
    grow(tmp_path)
    assert build("--extend") == 0
    ids = read_plan(tmp_path / "cache")["id"].to_pylist()
    assert ids == [sample_name(number) for number in (*range(10, LONG), *range(10))]
    np.testing.assert_array_equal(open_cache(tmp_path / "cache").read(np.arange(7)), kept[:7])
    assert not verify(tmp_path / "cache", "full").findings


def test_an_extended_cache_is_rerun_repaired_and_restored_like_any_other(build, tmp_path, capsys):
    """Its plan is not sorted by id as a whole."""
    grow(tmp_path, range(10, LONG))
    assert build() == 0
    grow(tmp_path)
    assert build("--extend") == 0
    cache, before = tmp_path / "cache", timeless_files(tmp_path / "cache")
    assert build() == build("--extend") == build("--check-sources") == 0
    assert capsys.readouterr().out.count("nothing to encode") == 3
    shard = cache / "latents/c/1/0/0/0"
    shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
    report = str(tmp_path / "report.json")
    assert cache_store(["verify", str(cache), "--level", "full", "--report", report]) == 1
    assert main(["repair", str(cache), "--report", report]) == 0
    assert timeless_files(cache) == before
    for name in ("plan.parquet", "zarr.json", "seal.json"):
        (cache / name).unlink()
        assert build() == 0
        assert timeless_files(cache) == before


def test_a_cache_can_be_extended_twice(build, tmp_path):
    assert build() == 0
    for samples in (15, LONG):
        grow(tmp_path, range(samples))
        assert build("--extend") == 0
        assert read_spec(tmp_path / "cache").rows == samples
    assert build(cache="whole") == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "whole")


def test_an_unsealed_cache_is_extended_and_finished(build, tmp_path):
    assert build() == 0
    cache = tmp_path / "cache"
    for name in ("seal.json", "commits/000000.json"):
        (cache / name).unlink()
    grow(tmp_path)
    assert build("--extend") == 0
    assert build(cache="whole") == 0
    assert timeless_files(cache) == timeless_files(tmp_path / "whole")


def test_a_grown_list_is_refused_with_the_command_that_extends(build, tmp_path, capsys):
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path)
    capsys.readouterr()
    assert build() == 1
    message = capsys.readouterr().err
    assert "  samples     12            22\n  new sample                sample-012\n" in message
    assert f"precompute build --config {tmp_path}/cache.yaml --extend" in message
    assert places(tmp_path / "cache") == before


def test_samples_that_are_gone_are_refused_with_the_flag_too(build, tmp_path, capsys):
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path, range(2, LONG))
    assert build("--extend") == 1
    message = capsys.readouterr().err
    assert "2 gone (sample-000, sample-001)" in message
    assert "--cache NEW" in message
    assert places(tmp_path / "cache") == before


def test_an_image_that_changed_is_refused_with_the_flag_too(build, tmp_path, capsys):
    assert build() == 0
    before = places(tmp_path / "cache")
    write_source(tmp_path / "source", range(LONG), sample_009=image_bytes(99))
    assert build("--extend") == 1
    assert "1 of 12 images are not the ones encoded: sample-009" in capsys.readouterr().err
    assert places(tmp_path / "cache") == before


def test_a_list_too_long_for_any_cache_is_refused_before_anything_is_touched(build, tmp_path, capsys, monkeypatch):
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path)
    monkeypatch.setattr("cache_store.cache.metadata.MAX_SHARDS", 2)  # a real one too many is a million
    capsys.readouterr()
    assert build("--extend") == 2
    assert "no cache can hold 22 samples of this size: 3 shards, more than 2" in capsys.readouterr().err
    assert places(tmp_path / "cache") == before


def test_rejects_stay_rejected_through_an_extension(build, tmp_path):
    """One in a shard that is kept; it is tried again only if that is asked for."""
    grow(tmp_path, range(SHORT))
    assert build() == 0
    grow(tmp_path)
    assert build("--extend") == 0
    seal = read_seal(tmp_path / "cache")
    assert (seal.planned, seal.cached, seal.rejected) == (22, 20, 2)


def test_repair_leaves_new_samples_out_and_says_so(build, tmp_path, capsys):
    assert build() == 0
    before = timeless_files(tmp_path / "cache")
    grow(tmp_path)
    assert main(["repair", str(tmp_path / "cache"), "--shards", "[1]"]) == 0
    assert "10 samples are new in the source" in capsys.readouterr().err
    assert timeless_files(tmp_path / "cache") == before


def test_an_extension_with_another_recipe_is_refused(build, tmp_path, capsys):
    assert build() == 0
    before = places(tmp_path / "cache")
    grow(tmp_path)
    assert build("--extend", image__height=40) == 1
    message = capsys.readouterr().err
    assert "array.image.height" in message
    assert "rows" not in message
    assert places(tmp_path / "cache") == before


def test_the_flag_is_no_field_of_a_config(build, tmp_path, capsys):
    assert build() == 0
    path = tmp_path / "cache.yaml"
    path.write_text(path.read_text() + "extend: true\n")
    assert main(["build", "--config", str(path)]) == 2
    assert "there is no field extend" in capsys.readouterr().err


def test_a_begun_extension_goes_on_without_the_flag_and_is_undone_with_the_short_list(build, tmp_path, capsys):
    """Killed after its plan was written, before its spec was."""
    assert build() == 0
    short = timeless_files(tmp_path / "cache")
    grow(tmp_path)
    assert build(cache="whole") == 0
    plan = (tmp_path / "whole/plan.parquet").read_bytes()

    shutil.copytree(tmp_path / "cache", tmp_path / "undone")
    for cache in ("cache", "undone"):
        (tmp_path / cache / "plan.parquet").write_bytes(plan)
    assert build() == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "whole")

    grow(tmp_path, range(SHORT))
    capsys.readouterr()
    assert build(cache="undone") == 0
    message = capsys.readouterr().err
    assert "an extension that had only begun is undone" in message
    assert "damage" not in message
    assert timeless_files(tmp_path / "undone") == short


def test_a_list_that_grew_again_during_a_begun_extension_is_taken_as_it_is(build, tmp_path):
    assert build() == 0
    grow(tmp_path, range(15))
    assert build(cache="begun") == 0
    (tmp_path / "cache/plan.parquet").write_bytes((tmp_path / "begun/plan.parquet").read_bytes())
    grow(tmp_path)
    assert build() == 1
    assert build("--extend") == 0
    assert build(cache="whole") == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "whole")


def test_the_cache_remembers_the_list_that_it_was_extended_from(build, tmp_path):
    assert build() == 0
    grow(tmp_path)
    longer = (tmp_path / "source/chat.json").rename(tmp_path / "source/longer.json")
    assert build("--extend", source__path=str(longer)) == 0
    assert json.loads((tmp_path / "cache/build.json").read_text())["config"]["source"]["path"] == str(longer)
    assert main(["repair", str(tmp_path / "cache"), "--shards", "[2]"]) == 0


def test_a_damaged_full_shard_is_held_to_what_it_was(build, tmp_path, capsys):
    assert build() == 0
    cache = tmp_path / "cache"
    before = timeless_files(cache)
    (cache / "samples/000000.parquet").unlink()
    write_source(tmp_path / "source", range(LONG), sample_003=image_bytes(99))
    assert build("--extend") == 1
    assert "do not come out as they were, so that nothing of them was replaced: 0\n" in capsys.readouterr().err
    grow(tmp_path)
    assert build("--extend") == 0
    after = timeless_files(cache)
    for name in ("latents/c/0/0/0/0", "samples/000000.parquet"):
        assert after[name] == before[name]
    assert not verify(cache, "full").findings
