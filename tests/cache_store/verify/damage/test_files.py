"""Whole files that are lost, swapped, another cache's, or no files at all."""

import os
import shutil

import pytest

from cache_store.verify.verify import verify
from tests.cache_store.conftest import samples_of, shard_name, swap
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    ROWS,
    SHARD,
    SHARD_FILES,
    files_of,
    make_small,
    named,
    record_file,
    table_file,
)


@pytest.mark.parametrize("kind", SHARD_FILES)
def test_swapped_files_of_two_shards_are_both_named(cache, kind):
    names = {kind(cache, shard) for shard in (0, 1)}
    swap(*(cache / name for name in names))
    assert names <= named(verify(cache, "full").findings)


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


IDS, LATENTS = {"ids": [f"other-{row}" for row in range(ROWS)]}, {"latents": samples_of((4, 6, 5), ROWS, seed=1)}


@pytest.mark.parametrize(
    ("other", "kinds", "levels"),
    [
        (IDS, SHARD_FILES, LEVELS),
        (LATENTS, SHARD_FILES, LEVELS),
        (IDS | LATENTS, [shard_name], ["full"]),
        (IDS | LATENTS, [table_file], ["full"]),
    ],
    ids=["shard of other ids", "shard of other latents", "data", "table"],
)
def test_files_of_another_cache_of_the_same_shape_are_named(cache, form, tmp_path, other, kinds, levels):
    made = make_small(tmp_path / "other", form, **other)
    for kind in kinds:
        shutil.copy(made / kind(cache, SHARD), cache / kind(cache, SHARD))
    for level in levels:
        findings = verify(cache, level).findings
        assert kinds[-1](cache, SHARD) in named(findings)
        assert {finding.shard for finding in findings} == {SHARD}


@pytest.mark.parametrize(
    "put",
    [lambda path: (path / "inner").mkdir(parents=True), os.mkfifo, lambda path: path.symlink_to(path), None],
    ids=["folder", "pipe", "link to itself", "nothing"],
)
def test_what_is_no_file_is_named_and_never_waited_on(cache, put):
    for name in files_of(cache):
        kept = (cache / name).rename(cache.parent / "kept")
        if put:
            put(cache / name)
        reports = [verify(cache, level) for level in LEVELS]
        assert all(name in named(report.findings) for report in reports)
        if put:
            assert all(next(each.next_steps("report.json")).startswith(f"move {cache}/{name} away") for each in reports)
            (cache / name).rename(cache.parent / f"moved-{name.replace('/', '-')}")
        kept.rename(cache / name)
    assert not verify(cache, "full").findings
