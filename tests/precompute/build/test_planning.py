"""Parts are planned by one process or by ranks, killed anywhere: the plan is the same."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cache_store import open_cache
from cache_store.cache.metadata import open_plan
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.build import planning
from precompute.build.planning import ListedParts
from precompute.cli import main
from precompute.sources.source_files import SourceFiles
from tests.precompute.conftest import Project, timeless_files
from tests.precompute.sources.pictures import write_pictures

KINDS = ["webdataset", "parquet", "folder", "cache"]


@pytest.fixture
def source(project: Project, request: pytest.FixtureRequest) -> Project:
    """A project whose source of the kind asked for has eight parts, of three samples or a few more."""
    kind = getattr(request, "param", "webdataset")
    path = project.folder / "data"
    project.settings = {"store__rows_per_part": 3 if kind == "folder" else 2, "store__samples_per_shard": 2}
    files, form = (path, kind) if kind != "cache" else (project.folder / "tars", "webdataset")
    if kind == "folder":
        write_pictures(kind, path, *range(24))
    else:
        for number in range(8):
            write_pictures(form, files / f"{number}", *range(3 * number, 3 * number + 3))
    if kind == "cache":
        project.build(name="data", source={"kind": form, "path": str(files)})
    project.settings["source"] = {"kind": kind, "path": str(path)}
    return project


def plan_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in timeless_files(folder).items() if name.startswith(("plan", "texts", "zarr"))}


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_ranks_plan_what_one_process_does(source):
    """In any order, and again; what is left undone is planned by the process that joins."""
    source.step("plan", name="alone")
    for rank in (2, 1, 1):
        said = source.step("plan", "--rank", rank, "--world-size", 3)
        assert f"rank {rank} of 3 planned {3 if rank == 1 else 2} parts" in said
        assert "plan --config" in said
    source.step("plan")
    alone = source.folder / "alone"
    assert plan_files(source.cache) == plan_files(alone)
    assert len(plan_files(alone)) == 2 * 8 + 2
    assert "is planned" in source.step("plan", "--rank", 0, "--world-size", 3, code=1)
    source.build()
    assert len(open_cache(source.cache).spec.parts) == 8
    assert not verify(source.cache, "deep").findings


def test_ranks_whose_listings_differ_cannot_give_two_plans(source):
    """Those that see other files are refused; a process alone then plans anew."""
    source.step("plan", "--rank", 0, "--world-size", 2)
    write_pictures("webdataset", source.folder / "data" / "9", 30)
    said = source.step("plan", "--rank", 1, "--world-size", 2, code=1)
    assert "before the source changed; once no rank plans, run: precompute plan --config" in said
    source.step("plan")
    source.step("plan", name="alone")
    assert plan_files(source.cache) == plan_files(source.folder / "alone")
    one = {"name": "one", "source__path": f"{source.folder}/data/1.tar"}
    assert "is listed as one" in source.step("plan", "--rank", 0, "--world-size", 2, **one, code=2)


def kill_at_texts(project: Project, part: int, *options: object) -> None:
    """Plan in a process that is killed before it writes the texts of a part, counted from 1."""
    config, calls, put_texts = project.config(), itertools.count(1), planning.put_texts

    def act(*given: Any) -> Any:
        if next(calls) == part:
            os.kill(os.getpid(), signal.SIGKILL)
        return put_texts(*given)

    if (child := os.fork()) == 0:
        planning.put_texts = act
        main(["plan", "--config", str(config), *map(str, options)])
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_kill_loses_the_part_in_hand(source, monkeypatch):
    """Of a process alone, and of a rank; the process that joins them plans what is missing."""
    source.step("plan", name="alone")
    kill_at_texts(source, 4)
    planned, plan_table = list[int](), planning.plan_table
    monkeypatch.setattr(planning, "plan_table", lambda *given: planned.append(given[2]) or plan_table(*given))
    source.step("plan", "--rank", 1, "--world-size", 2)
    assert planned == [3, 5, 7]
    kill_at_texts(source, 2, "--rank", 0, "--world-size", 2)
    planned.clear()
    source.step("plan")
    assert planned == [6]
    assert plan_files(source.cache) == plan_files(source.folder / "alone")
    assert not [*source.cache.glob("plan/*.json")]


def test_a_file_that_was_written_is_looked_at_alone(source, monkeypatch):
    """Also to extend the cache; what is new in it becomes a part of its own, behind those of new files."""
    folder = source.folder / "data"
    source.build()
    listed, list_part = list[tuple[str, ...]](), ListedParts.tables

    def tables(self: ListedParts, names: tuple[str, ...]) -> Any:
        listed.append(names)
        return list_part(self, names)

    monkeypatch.setattr(ListedParts, "tables", tables)
    write_pictures("webdataset", folder / "3", 9, 10, 11)
    source.build()
    source.build()
    assert listed == [("3.tar",)]
    listed.clear()
    write_pictures("webdataset", folder / "5", 15, 16, 17, 31)
    write_pictures("webdataset", folder / "8", 40, 41)
    source.build("--extend")
    assert listed == [("5.tar",), ("8.tar",)]
    spec, plan = open_cache(source.cache).spec, open_plan(source.cache)
    assert [part.rows for part in spec.parts] == [3] * 8 + [2, 1]
    assert [int(name) for name in plan.part_rows(9, ["id"])["id"].to_pylist()] == [31]
    assert not verify(source.cache, "deep").findings
    with source.untouched():
        source.build()


@pytest.mark.parametrize(("sizes", "groups"), [([3, 3, 3, 3], 2), ([90, 1, 1], 2)])
def test_whole_files_share_a_part_that_has_some_rows(tmp_path, sizes, groups):
    """The first file has a row for a byte; a part takes files until it has six rows."""
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(bytes(size))
    files = SourceFiles(LocalStore(tmp_path), [str(number) for number in range(len(sizes))])
    found = files.grouped(6, sizes[0])
    assert len(found) == groups
    assert [name for names in found for name in names] == (files.names if groups > 1 else [])
