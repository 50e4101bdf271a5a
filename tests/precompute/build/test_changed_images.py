"""Images that changed since they were encoded: refused by name, or accepted by a flag."""

import os
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import open_plan, read_build, read_seal
from tests.precompute.acts import MISSING, NOT_ENCODED, RECORD, build_with_a_missing_image, image, mend
from tests.precompute.conftest import BROKEN, SAMPLES, Project, sample_name


@pytest.fixture
def folder(project: Project) -> Project:
    return build_with_a_missing_image(project)


def test_a_record_that_cannot_be_read_stops_a_build(built):
    """Reading /proc/self/mem at its start is a real input/output error."""
    built.lose(RECORD)
    (built.cache / RECORD).symlink_to("/proc/self/mem")
    with built.untouched():
        assert f"Input/output error: {built.cache}/{RECORD}" in built.build(code=1)


def test_rows_stay_where_they_are_when_new_ids_sort_first(project):
    """The plan then has another order than the source, but the cache is rerun and repaired like any other."""
    project.has(range(10, SAMPLES))
    project.build()
    kept = open_cache(project.cache).read(np.arange(7))
    project.has()
    longer = (project.source / "chat.json").rename(project.source / "longer.json")
    project.build("--extend", source__path=str(longer))
    assert read_build(project.cache).config["source"]["path"] == str(longer)
    project.repair("--shards", "[2]")
    longer.rename(project.source / "chat.json")
    project.build()
    plan = open_plan(project.cache)
    ids = [name for part in range(2) for name in plan.part_rows(part, ["id"])["id"].to_pylist()]
    assert ids == [sample_name(number) for number in (*range(10, SAMPLES), *range(10))]
    np.testing.assert_array_equal(open_cache(project.cache).read(np.arange(7)), kept)
    with project.same_in_the_end():
        project.build("--check-sources")
        before = project.place.marks()
        project.lose("plan/000000.parquet")
        assert "plan/000000.parquet is lost" in project.build(code=1)
        project.repair()
        assert project.place.marks()["plan/000001.parquet"] == before["plan/000001.parquet"]


def test_an_extension_names_rejects_that_may_succeed_now(folder):
    folder.has(range(24))
    mend(folder, MISSING, BROKEN[0], 22, 23)
    said = folder.build("--extend")
    assert "there now, or have changed: 2 (" in said
    assert all(sample_name(number) in said for number in (MISSING, BROKEN[0]))
    seal = read_seal(folder.cache)
    assert (seal.spec.rows, seal.rejected) == (24, len(BROKEN) + 1)


def change_in_secret(path: Path) -> None:
    """Flip a bit and keep size and time; a second call undoes it."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_check_reads_every_image_before_other_work(folder):
    with folder.untouched():
        assert f"{SAMPLES} images" in folder.build("--check-sources")
    folder.lose("seal.json", "commits/000002.json")
    change_in_secret(image(folder, 7))
    message = folder.build("--check-sources", code=1)
    assert f"{NOT_ENCODED}{sample_name(7)}" in message
    assert not (folder.cache / "commits/000002.json").exists()
    change_in_secret(image(folder, 7))
    assert "16 images" in folder.build("--check-sources")
    image(folder, 7).unlink()
    assert "missing" in folder.build("--check-sources", code=1)
