"""A rerun lists its source again only where a file of it was written, added or taken away."""

import json
import os
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_build
from precompute.build import build as module
from tests.precompute.acts import RECORD, copied, flipped, lost
from tests.precompute.conftest import Project
from tests.precompute.sources.test_parquet import write_dataset
from tests.precompute.sources.test_webdataset import numbered, write_tar

COUNT = 10


def as_list(project: Project) -> Path:
    return project.source / "chat.json"


def as_lines(project: Project) -> Path:
    chat = as_list(project)
    chat.write_text("\n".join(map(json.dumps, json.loads(chat.read_text()))))
    return chat


def as_zip(project: Project) -> Path:
    project.settings = {"source": {"kind": "folder", "path": str(project.images)}}
    return project.images


def as_tars(project: Project) -> Path:
    project.settings = {"source": {"kind": "webdataset", "path": str(project.folder / "tars")}}
    write_tar(project.folder / "tars/0.tar", numbered(*range(6)))
    return write_tar(project.folder / "tars/1.tar", numbered(*range(6, COUNT)))


def as_parquet(project: Project) -> Path:
    path = project.folder / "data/train-0.parquet"
    project.settings = {"source": {"kind": "parquet", "path": str(project.folder / "data/*.parquet")}}
    write_dataset(path, *range(COUNT))
    return path


KINDS = {each.__name__: each for each in (as_list, as_lines, as_zip, as_tars, as_parquet)}


@pytest.fixture(params=KINDS)
def file(request: pytest.FixtureRequest, project: Project) -> Path:
    """Of a source of every kind, in three shards or two."""
    path = KINDS[request.param](project)
    project.settings |= {"store__samples_per_shard": 4}
    project.build()
    return path


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that a source is listed."""
    seen = list[None]()
    list_samples = module.list_samples

    def counted(inputs: module.Inputs) -> module.Wanted:
        seen.append(None)
        return list_samples(inputs)

    monkeypatch.setattr(module, "list_samples", counted)
    return seen


def test_what_is_as_it_was_is_not_listed_again(project, file, listings):
    """By a build that was killed, as by one that was not: its bytes in the end are the same."""
    with project.place.untouched():
        assert "nothing to encode" in project.build()
    with project.same_in_the_end():
        project.lose(RECORD, "seal.json")
        project.build()
    assert not listings


def test_what_was_written_is_listed_again_and_once(project, file, listings):
    before = file.read_bytes()
    os.utime(file, ns=(0, 1))
    with project.same_in_the_end():
        for _ in range(2):
            assert "nothing to encode" in project.build()
    assert len(listings) == 1
    file.write_bytes(before[: len(before) // 2])
    project.build(code=1)
    assert len(listings) == (1 if file.suffix in (".zip", ".parquet") else 2)  # some are refused when they are opened


@pytest.mark.parametrize("kind", ["as_tars", "as_parquet"])
def test_a_file_more_or_less_is_seen(project, kind):
    file = KINDS[kind](project)
    project.build()
    more = file.with_stem("train-9")
    {"as_tars": lambda: write_tar(more, numbered(20)), "as_parquet": lambda: write_dataset(more, 20)}[kind]()
    assert "was planned from fewer" in project.build(code=1)
    more.unlink()
    with project.place.untouched():
        project.build()
    file.rename(more)
    project.build(code=1)


DOUBTS = {
    "plan damaged": flipped("plan.parquet"),
    "spec lost": lost("zarr.json"),
    "build record lost": lost("build.json"),
    "seal of another plan": copied("texts", "seal.json"),
    "config": lambda project: project.settings.update(image__resample="bicubic"),
    "flag": lambda project: project.build("--check-sources"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_where_the_plan_is_in_doubt_the_source_is_listed(built, listings, doubt):
    with built.same_in_the_end():
        DOUBTS[doubt](built)
        built.build(code=1 if doubt == "config" else 0)
    assert len(listings) == 1


def test_a_folder_of_images_is_looked_at_each_time(built, listings):
    """Nothing less tells that none was written."""
    built.unpack()
    built.build()
    built.build()
    assert len(listings) == 2
    assert read_build(built.cache).listed is None
