"""New captions reach a cache of images without an encoder; a plan is cut into parts that grow behind the others."""

from typing import Any

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_texts
from cache_store.cli import main as cache_store
from cache_store.errors import StaleError
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.acts import flipped
from tests.precompute.conftest import SAMPLES, Project, sample_name


@pytest.fixture
def parts(project: Project) -> Project:
    """A project whose plan has three parts."""
    project.settings = {"store__rows_per_part": 10, "store__samples_per_shard": 4}
    project.build()
    return project


def recaption(project: Project, *numbers: int) -> None:
    def change(number: int, record: dict[str, Any]) -> None:
        if number in numbers:
            record["conversations"][1]["value"] = f"new words {number}"

    project.edit(change)


def texts_of(project: Project) -> dict[str, bytes]:
    return {name: data for name, data in project.place.files().items() if name.startswith("texts")}


def test_only_the_texts_of_parts_that_changed_are_written(parts):
    """The cache stays sealed, with its identity; readers keep what they opened, whose files stay until the next."""
    opened, before = open_cache(parts.cache), parts.place.marks()
    assert opened.captions(np.array([0])) != ["new words 0"]
    recaption(parts, 0, 21)
    assert "precompute captions" in parts.build()
    said = parts.run(main, "captions", parts.cache)
    assert f"2 samples ({sample_name(0)}, {sample_name(21)})" in said
    written = {name for name, mark in parts.place.marks().items() if before.get(name) != mark} - {"build.json"}
    assert {name[:12] for name in written} == {"texts.json", "texts/000000", "texts/000002"}
    assert not before.keys() - parts.place.marks().keys()
    now = open_cache(parts.cache)
    assert (now.identity, now.captions(np.array([0]))) == (opened.identity, ["new words 0"])
    assert opened.captions(np.array([1])) == now.captions(np.array([1]))
    assert not verify(parts.cache, "deep").findings
    with parts.unchanged():
        assert "0 samples" in parts.run(main, "captions", parts.cache)
        assert "nothing to encode" in parts.build()
    recaption(parts, 1)
    parts.run(main, "captions", parts.cache)
    assert len(texts_of(parts)) == 1 + 3 + 3 - 2, "the texts of two parts are as before"


def test_caches_of_other_texts_are_joined_once_they_have_the_same(parts):
    parts.build(name="flipped", source={"kind": "cache", "path": str(parts.cache)}, image__flip=True)
    both = {"one": parts.cache, "two": parts.folder / "flipped"}
    assert open_cache(both["two"]).spec.parts == open_cache(both["one"]).spec.parts
    recaption(parts, 3)
    parts.run(main, "captions", parts.cache)
    with pytest.raises(StaleError, match=f"(?s)texts .*precompute captions {both['two']}"):
        open_joined(both)
    parts.run(main, "captions", both["two"])
    assert open_joined(both).captions(np.array([3])) == ["new words 3"]


def write_list(project: Project, first: int = 0) -> list[object]:
    """Write a table of the samples from the first on, the last one on top; return the options that name it."""
    path, names = project.folder / "better.csv", map(sample_name, reversed(range(first, SAMPLES)))
    path.write_text("id,text,score\n" + "".join(f"{name},of {name},0.5\n" for name in names))
    return ["--source.path", path, "--source.fields.extra", "[score]"]


def test_another_source_of_the_same_ids_gives_its_texts_and_columns(parts):
    """Ids that it lacks are refused, or keep their texts."""
    source = write_list(parts, first=1)
    with parts.unchanged():
        said = parts.run(main, "captions", parts.cache, *source, code=1)
    assert f"lacks 1 sample of {parts.cache}: {sample_name(0)};" in said
    old = open_cache(parts.cache).captions(np.array([0]))
    assert "kept their texts" in parts.run(main, "captions", parts.cache, *source, "--keep_missing", "true")
    cache = open_cache(parts.cache)
    assert cache.captions(np.array([0, 1])) == [*old, f"of {sample_name(1)}"]
    assert cache.samples(np.array([0, 1]), ["score"])["score"].to_pylist() == [None, 0.5]
    assert not verify(parts.cache, "deep").findings


def test_a_withdrawal_leaves_no_text_of_a_sample_in_any_version(parts):
    recaption(parts, 5)
    parts.run(main, "captions", parts.cache)
    (parts.folder / "ids.txt").write_text(sample_name(5))
    parts.run(cache_store, "withdraw", parts.cache, "--ids", parts.folder / "ids.txt")
    assert len(texts_of(parts)) == 1 + 3
    with parts.same_in_the_end():
        assert "0 samples" in parts.run(main, "captions", parts.cache)
    assert open_cache(parts.cache).withdrawn_rows().tolist() == [5]


@pytest.mark.parametrize("file", ["plan/000001.parquet", "texts.json", "texts/000001"])
def test_a_part_and_its_texts_are_named_and_restored(parts, file):
    name = next(each for each in parts.place.marks() if each.startswith(file))
    assert np.diff(open_cache(parts.cache).spec.bounds).tolist() == [4, 4, 2, 4, 4, 2, 2]
    with parts.same_in_the_end():
        flipped(name)(parts)
        assert name in {finding.file for finding in verify(LocalStore(parts.cache), "full").findings}
        parts.repair("--report", parts.report())


def test_what_is_refused_leaves_no_file(parts):
    nope, gone = [*write_list(parts), "--source.fields.extra", "[nope]"], ["--source.path", parts.folder / "gone.csv"]
    for source, code, named in ((nope, 1, "nope"), (gone, 2, "gone.csv does not exist")):
        with parts.unchanged():
            assert named in parts.run(main, "captions", parts.cache, *source, code=code)


def test_texts_in_force_that_are_lost_are_never_others(parts):
    """Texts of another list are not the source's; `captions` reads either again, whatever is lost."""
    listed = write_list(parts)
    parts.run(main, "captions", parts.cache, *listed)
    name = next(each for each in read_texts(LocalStore(parts.cache)).files if "000001" in each)
    for lost in ("texts.json", name):
        parts.lose(lost)
        with parts.unchanged():
            assert f"precompute captions {parts.cache}" in parts.repair(code=1)
        parts.run(main, "captions", parts.cache, *listed)
        assert open_cache(parts.cache).captions(np.array([12]))[0].startswith("of ")
        assert not verify(parts.cache, "deep").findings


def test_a_column_that_the_source_has_now_is_added(parts):
    parts.edit(lambda _, record: record.update(score=1.5))
    assert "columns: score" in parts.run(main, "captions", parts.cache, "--source.fields.extra", "[score]")
