"""Fields of a source's samples that travel in the plan: extra columns, and several captions."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import open_plan, read_texts
from cache_store.cli import main as cache_store
from cache_store.errors import ConfigError, SourceError
from cache_store.format.plan import answers_of
from cache_store.format.tables import MAX_EXTRA
from cache_store.verify.verify import verify
from precompute.sources.config import FieldNames, SourceConfig
from precompute.sources.images import Source
from precompute.sources.opening import open_source
from precompute.sources.tables import LISTED
from tests.precompute.conftest import image_bytes, plan_table
from tests.precompute.sources.pictures import write_tar

Fields = Mapping[str, object]

GIVEN: tuple[Fields, ...] = (
    {"score": 5, "split": "train", "nsfw": False, "tags": ["a", "é"], "seen": 2**62},
    {"score": 6.25, "split": None, "nsfw": True, "tags": [], "seen": None},
    {"split": "val"},
)
TYPES = {
    "score": pa.float64(),
    "split": pa.string(),
    "nsfw": pa.bool_(),
    "tags": pa.list_(pa.string()),
    "seen": pa.int64(),
}


def sources(folder: Path, given: tuple[Fields, ...], extra: list[str]) -> dict[str, Source]:
    """Write the same fields as each kind of source that has some, and open these."""
    names, fields = [f"{number:03d}" for number in range(len(given))], FieldNames(extra=extra)
    records = [{"id": name, "conversations": [], **each} for name, each in zip(names, given, strict=True)]
    (folder / "list.json").write_text(json.dumps(records))
    (folder / "lines.json").write_text("\n".join(map(json.dumps, records)))
    parts = [{"png": image_bytes(0), "json": json.dumps(each).encode()} for each in given]
    write_tar(folder / "a.tar", dict(zip(names, parts, strict=True)))
    rows = [{"id": name, "image": image_bytes(0), **each} for name, each in zip(names, given, strict=True)]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "image", *TYPES)}
    typed = {name: pa.array(values, TYPES.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(typed), folder / "a.parquet")
    kinds = {"list.json": "llava", "lines.json": "llava", "a.tar": "webdataset", "a.parquet": "parquet"}
    return {
        file: open_source(SourceConfig(kind=kind, path=str(folder / file), fields=fields))  # type: ignore[arg-type]
        for file, kind in kinds.items()
    }


def test_fields_of_every_kind_of_source_become_columns_of_the_type_that_their_values_share(tmp_path):
    expected = [{name: each.get(name) for name in TYPES} for each in GIVEN]
    for source in sources(tmp_path, GIVEN, [*TYPES]).values():
        plan = plan_table(source.samples())
        assert plan.schema == pa.schema([*LISTED, *TYPES.items()])
        assert plan.select([*TYPES]).to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((5, "5"), "int (sample 000) and str (sample 001)"),
        ((2**63, 1), "score is int (sample 000)"),
        (([1], None), "score is list (sample 000)"),
    ],
)
def test_values_that_a_column_cannot_hold_are_refused_by_field_and_sample(tmp_path, values, named):
    (path := tmp_path / "chat.json").write_text(
        json.dumps([{"id": f"{row:03d}", "conversations": [], "score": value} for row, value in enumerate(values)])
    )
    source = open_source(SourceConfig(kind="llava", path=str(path), fields=FieldNames(extra=["score"])))
    with pytest.raises(SourceError) as refused:
        plan_table(source.samples())
    assert named in str(refused.value)


def test_numbers_that_are_not_finite_are_absent(tmp_path):
    columns = {"image": [image_bytes(0)] * 3, "score": [np.nan, np.inf, 1.5]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    fields = FieldNames(extra=["score"])
    source = open_source(SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet"), fields=fields))
    assert plan_table(source.samples())["score"].to_pylist() == [None, None, 1.5]


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["uri"], "uri"),
        (["a", "a"], "a is named twice"),
        (["a.b"], "a.b"),
        ([f"f{number}" for number in range(MAX_EXTRA + 1)], str(MAX_EXTRA)),
    ],
)
def test_names_that_no_extra_column_can_have_are_refused(names, named):
    with pytest.raises(ConfigError, match=r"source\.fields\.extra") as refused:
        FieldNames(extra=names)
    assert named in str(refused.value)


def test_an_unknown_column_and_a_source_without_fields_are_refused_by_name(tmp_path):
    pq.write_table(pa.table({"image": [image_bytes(0)]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="no column score"):
        open_source(SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet"), fields=FieldNames(extra=["score"])))
    for kind in ("folder", "cache"):
        with pytest.raises(ConfigError, match=r"source\.fields\.extra"):
            SourceConfig(kind=kind, path=str(tmp_path), fields=FieldNames(extra=["score"]))  # type: ignore[arg-type]


def test_several_captions_are_the_answers_of_a_conversation(tmp_path):
    """A list and a text, one after the other; without any, the caption; conversations win."""
    given: list[dict[str, Any]] = [
        {"many": ["a", None, "b"], "one": "c", "caption": "not this"},
        {"many": None, "one": None, "caption": "d"},
        {"many": [], "one": "", "caption": None},
        {"many": ["e"], "one": None, "caption": None},
    ]
    columns = {name: [each[name] for each in given] for name in given[0]}
    pq.write_table(pa.table({"image": [image_bytes(0)] * 4, **columns}), path := tmp_path / "a.parquet")
    fields = FieldNames(captions=["many", "one"], extra=["one"])
    table = plan_table(open_source(SourceConfig(kind="parquet", path=str(path), fields=fields)).samples())
    assert [answers_of(each) for each in table["conversations"].to_pylist()] == [["a", "b", "c"], ["d"], [""], ["e"]]
    assert table["one"].to_pylist() == ["c", None, "", None]
    first = table["conversations"][0].as_py()
    assert [turn["value"] for turn in first if turn["from"] == "human"] == ["<image>", "", ""]


@pytest.mark.parametrize("value", [5, [["a"]]])
def test_a_caption_that_is_no_text_is_refused_by_file_and_field(tmp_path, value):
    path = write_tar(tmp_path / "a.tar", {"7": {"png": image_bytes(0), "json": json.dumps({"many": value}).encode()}})
    source = open_source(SourceConfig(kind="webdataset", path=str(path), fields=FieldNames(captions=["many"])))
    with pytest.raises(SourceError, match=r"a\.tar/7\.json: .*many"):
        plan_table(source.samples())


def score_digest(rows: list[dict[str, Any]]) -> str:
    """Compute the digest of texts as the page of the format says it."""
    how: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":"), "sort_keys": True}
    texts = [[row["id"], row["conversations"], {"score": float.hex(row["score"])}] for row in rows]
    lines = [json.dumps(each, **how) for each in texts]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def test_extra_columns_go_the_whole_way(project):
    """The samples' scores are half their numbers."""
    project.edit(lambda number, record: record.update(score=number / 2))
    project.settings = {"source__fields": {"extra": ["score"]}}
    project.build()
    cache = open_cache(project.cache)
    numbers = np.array([7, 0, 3])
    expected = [row["row"] / 2 for row in cache.samples(numbers, ["row"]).to_pylist()]
    assert cache.samples(numbers, ["score"])["score"].to_pylist() == expected
    plan = open_plan(project.cache)
    rows = [row for shard in range(plan.num_shards) for row in plan.shard(shard).to_pylist()]
    assert score_digest(rows) == read_texts(cache.store).parts[0].digest
    assert not verify(project.cache, "deep").findings
    for name, options in (("tars", ("--format", "webdataset")), ("packed", ("--reshard",))):
        project.run(cache_store, "copy", project.cache, project.folder / name, *options)
        assert open_cache(project.folder / name).samples(numbers, ["score"])["score"].to_pylist() == expected
        assert not verify(project.folder / name, "deep").findings
    project.build(name="flipped", source={"kind": "cache", "path": str(project.cache)}, image__flip=True)
    joined = open_joined({"world": project.cache, "flipped": project.folder / "flipped"})
    assert joined.samples(numbers, ["score", "width"])["score"].to_pylist() == expected
    with project.same_in_the_end():
        project.lose("plan/000000.parquet")
        project.repair()
