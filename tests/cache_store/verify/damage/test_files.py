"""Whole files that are lost, swapped, another cache's, or lie where they do not belong; and what mends it, in order."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    ROWS,
    SHARD,
    SHARD_FILES,
    files_of,
    make_small,
    named,
    record_file,
    small_latents,
    table_file,
)


def swap(first: Path, second: Path) -> None:
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


@pytest.mark.parametrize("kind", SHARD_FILES)
def test_swapped_files_of_two_shards_are_both_named(cache, kind):
    names = [kind(cache, shard) for shard in (0, 1)]
    swap(*(cache / name for name in names))
    assert set(names) <= named(verify(cache, "full").findings)


def test_two_wholly_swapped_shards_are_named_by_their_records(cache):
    """Data, samples and record together: every crc and hash inside is right."""
    for kind in SHARD_FILES:
        swap(*(cache / kind(cache, shard) for shard in (0, 1)))
    for level in LEVELS:
        findings = verify(cache, level).findings
        assert {record_file(cache, shard) for shard in (0, 1)} <= named(findings)
        assert {finding.shard for finding in findings} == {0, 1}


def test_files_that_are_lost_with_their_record_are_named(cache):
    lost = {kind(cache, SHARD) for kind in SHARD_FILES}
    for name in lost:
        (cache / name).unlink()
    assert all(named(verify(cache, level).findings) == lost for level in LEVELS)


def test_a_missing_folder_is_named_by_every_file_that_was_in_it(cache):
    for folder in sorted({name.partition("/")[0] for name in files_of(cache) if "/" in name}):
        lost = {name for name in files_of(cache) if name.startswith(f"{folder}/")}
        (cache / folder).rename(cache.parent / "away")
        assert all(lost <= named(verify(cache, level).findings) for level in LEVELS)
        (cache.parent / "away").rename(cache / folder)


OTHERS: dict[str, dict[str, Any]] = {
    "other samples": {"ids": [f"other-{row}" for row in range(ROWS)]},
    "other latents": {"latents": small_latents(seed=1)},
}


@pytest.mark.parametrize("options", OTHERS)
def test_a_shard_of_another_cache_of_the_same_shape_is_named(cache, form, tmp_path, options):
    other = make_small(tmp_path / "other", form, **OTHERS[options])
    for kind in SHARD_FILES:
        shutil.copy(other / kind(cache, SHARD), cache / kind(cache, SHARD))
    for level in LEVELS:
        findings = verify(cache, level).findings
        assert record_file(cache, SHARD) in named(findings)
        assert {finding.shard for finding in findings} == {SHARD}


@pytest.mark.parametrize("kind", [shard_name, table_file])
def test_a_file_of_another_cache_of_the_same_shape_is_named(cache, form, tmp_path, kind):
    other = make_small(tmp_path / "other", form, ids=[f"other-{row}" for row in range(ROWS)], latents=small_latents(1))
    name = kind(cache, SHARD)
    shutil.copy(other / name, cache / name)
    findings = verify(cache, "full").findings
    assert name in named(findings)
    assert {finding.shard for finding in findings} == {SHARD}


def test_what_a_dead_build_left_is_named(cache):
    folders = {"", *(f"{name.rpartition('/')[0]}/" for name in files_of(cache) if "/" in name)}
    left = {f"{folder}.000001.1.partial" for folder in folders}
    for name in left:
        (cache / name).write_bytes(b"half")
    assert all(named(verify(cache, level).findings) == left for level in LEVELS)


def test_what_does_not_belong_is_named(cache):
    folder = shard_name(cache, SHARD).partition("/")[0]
    strangers = {f"{folder}/extra", "samples/000099.parquet", "commits/notes.txt", "commits/features"}
    for name in strangers:
        if "." in name:
            (cache / name).write_bytes(b"?")
        else:
            (cache / name).mkdir()
    assert all(named(verify(cache, level).findings) == strangers for level in LEVELS)


def folder_in_the_way(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def pipe_in_the_way(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("put", [folder_in_the_way, pipe_in_the_way, link_to_itself])
def test_what_is_no_file_is_named_and_never_waited_on(cache, put):
    for name in files_of(cache):
        kept = (cache / name).read_bytes()
        put(cache / name)
        found = verify(cache, "full")
        assert name in named(found.findings)
        assert next(found.next_steps("report.json")).startswith(f"move {cache}/{name} away")
        (cache / name).rename(cache.parent / f"moved-{name.replace('/', '-')}")
        (cache / name).write_bytes(kept)
    assert not verify(cache, "full").findings


def test_a_file_in_place_of_a_folder_is_to_be_deleted_before_a_repair(cache):
    shutil.rmtree(cache / "commits")
    (cache / "commits").write_bytes(b"?")
    first, *others = verify(cache, "full").next_steps("report.json")
    assert first.startswith(f"delete {cache}/commits")
    assert others[0].startswith("precompute repair")


def test_a_damaged_build_record_is_mended_before_any_repair(cache):
    (cache / "build.json").write_bytes(b"{")
    (cache / "samples/000001.parquet").unlink()
    first, second = verify(cache, "full").next_steps("report.json")
    assert first.startswith(
        "rerun the `precompute build` or `cache-store convert` that made the cache: it writes build.json again"
    )
    assert second.startswith("precompute repair")
