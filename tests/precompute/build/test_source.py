"""A rerun reads each file once, and uses the cache's plan if no file of the source was written, added or removed."""

import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cache_store.storage.local import LocalStore
from cache_store.storage.store import STORES
from precompute.build import source as module
from precompute.build.planning import ListedParts
from tests.faulty_store import CountingStore
from tests.precompute.acts import RECORD, copied, lost, rewrite
from tests.precompute.conftest import SAMPLES, Project, image_bytes, sample_name
from tests.precompute.sources.pictures import write_pictures

KINDS = ["list", "zip", "webdataset", "parquet"]


@pytest.fixture(params=KINDS)
def file(request: pytest.FixtureRequest, project: Project) -> Path:
    """A file of a source of the kind, whose cache is built."""
    project.settings, kind, data = {"store__samples_per_shard": 4}, request.param, project.folder / "data"
    path = project.images if kind == "zip" else project.source / "chat.json"
    if kind in ("webdataset", "parquet"):
        write_pictures(kind, data / "0", *range(6))
        path = write_pictures(kind, data / "1", *range(6, 10))
    if kind != "list":
        source = {"kind": "folder", "path": str(path)} if kind == "zip" else {"kind": kind, "path": str(data)}
        project.settings["source"] = source
    project.build()
    return path


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry each time a source is listed."""
    seen = list[None]()

    def counted(*given: Any) -> ListedParts:
        seen.append(None)
        return ListedParts(*given)

    monkeypatch.setattr(module, "ListedParts", counted)
    return seen


def test_only_what_was_written_is_listed_again_and_once(project, file, listings):
    """Even if size and time are the old ones, and whether or not a shard is left to build."""
    with project.same_in_the_end():
        with project.place.untouched():
            project.build()
        project.lose(RECORD, "seal.json")
        project.build()
        assert not listings
        time_ns = file.stat().st_mtime_ns
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(time_ns, time_ns))
        for _ in range(2):
            project.build()
    assert len(listings) == 1


def test_a_rerun_of_a_finished_build_opens_each_file_once_and_touches_none(built, monkeypatch):
    opened, texts = Counter[str](), [path.relative_to(built.cache).as_posix() for path in built.cache.glob("texts/*")]
    monkeypatch.setitem(STORES, "counting", lambda path: CountingStore(Path(path), opened))
    with built.untouched():
        built.build("--cache", f"counting://{built.cache}")
    metadata = ["build.json", "latents/40x32/zarr.json", "latents/zarr.json", "plan/000000.parquet", "seal.json"]
    metadata += ["zarr.json", "rejected.parquet", "shards.bin", "texts.json", *texts]
    opened.subtract(["plan/000000.parquet", "texts.json"])  # hashed, and then its footer; and for leftovers
    assert opened == dict.fromkeys([*(f"commits/{shard:06d}.json" for shard in range(3)), *metadata], 1)


def test_what_is_missing_is_asked_of_each_build(project, listings):
    """Each build checks how many may be missing, and whether they are back."""
    missing = f"{sample_name(SAMPLES)}.png"
    rewrite(project.source / "chat.json", '"sample-000.png"', f'"{missing}"')
    project.build()
    project.build(run__max_reject_fraction=0.01, code=1)
    with zipfile.ZipFile(project.images, "a") as archive:
        archive.writestr(missing, image_bytes(0))
    for _ in range(2):
        assert "sample-000" in project.build()
    assert len(listings) == 4
    assert "recovered 1 of 3" in project.build("--retry-rejected")
    with project.place.untouched():
        project.build()
    assert len(listings) == 5


DOUBTS = {
    "build record lost": lost("build.json"),
    "build record of another cache": copied("images", "build.json"),
    "flag": lambda project: project.build("--check-sources"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_where_the_plan_is_in_doubt_the_source_is_listed(built, listings, doubt):
    with built.same_in_the_end():
        DOUBTS[doubt](built)
        built.build()
    assert len(listings) == 1


def test_what_may_not_fit_is_said_before_anything_is_encoded(project, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 11_000)
    assert "take up to 14,080 bytes, and 11,000 are free there" in project.step("plan")
    assert "are free there" not in project.step("plan", name="packed", store__codec="zstd")
