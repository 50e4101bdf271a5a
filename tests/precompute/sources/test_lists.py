"""Lists as a source, LLaVA's and tables of file names: their rows, and errors that name file, row and column."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.errors import SourceError
from cache_store.format.plan import caption_of
from precompute.inputs.frames import ImageReader
from precompute.sources.config import FieldNames, SourceConfig
from precompute.sources.images import Source
from precompute.sources.media import IMAGES, VIDEOS, Media
from precompute.sources.opening import open_source
from precompute.sources.place import MISSING
from tests.precompute.conftest import image_bytes, plan_table
from tests.precompute.images.fitting import recipe_of


def record(name: str, **more: object) -> dict[str, object]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"A {name}."}]
    return {"id": name, "image": f"{name}.jpg", "conversations": turns, **more}


def listed(folder: Path, kind: Any, text: object, media: Media = IMAGES, **fields: object) -> Source:
    """Write and open a list: of records, or of this text or these bytes."""
    path = folder / "list.txt"
    text = text if isinstance(text, str | bytes) else json.dumps(text)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_source(SourceConfig(kind=kind, path=str(path), fields=FieldNames(**fields)), media)


def test_records_of_any_lawful_list_become_rows_in_its_order(tmp_path):
    """It has unknown fields, impossible names, a field that occurs twice, and a byte order mark."""
    records = [
        {**record("a"), "id": 7},
        {**record("nul\0"), "image": "nul\0.jpg", "more": {"deep": [1, None, {}]}},
        {**record("path"), "image": "../" * 5 + "etc/passwd"},
        {**record("name"), "image": "x" * 10**5},
    ]
    text = json.dumps(records)[:-1] + ', {"id": "first", "id": "last", "conversations": []}]'
    plan = plan_table(listed(tmp_path, "llava", "\ufeff" + text).samples())
    assert plan["id"].to_pylist() == ["7", "nul\0", "path", "name", "last"]
    assert plan["uri"].to_pylist()[::4] == ["a.jpg", ""]
    assert plan["conversations"][0].as_py() == record("a")["conversations"]
    assert set(plan["fingerprint"].to_pylist()) == {MISSING}


def test_a_record_without_an_image_is_rejected_as_text_only(tmp_path):
    source = listed(tmp_path, "llava", [{**record("a"), "image": None}])
    (outcome,) = ImageReader(source, recipe_of()).read([*source.samples()], SimpleNamespace(size=None), [None])
    assert outcome.reason == "text only: the record names no image"


A = json.dumps(record("a"))

REFUSED: dict[str, tuple[bytes | Callable[[Path], object], str]] = {
    "a missing field": (f'[{A}, {{"id": "b"}}]'.encode(), "record 1 .counted from 0.: .*conversations"),
    "bytes that are no text": (f"[{A}, ".encode() + b'{"id": "\xff\xfe"}]', "record 1 .*utf-8"),
    "a million brackets": (b'[{"id": 1, "x": ' + b"[" * 10**6, "chat.json: .*recursion"),
    "two ids twice": (json.dumps([record(name) for name in "abcab"]).encode(), r"chat.json: 2 sample ids .*: a, b "),
    "a pickle": (pickle.dumps([{"id": "a"}]), "line 1: .*malformed"),
    "a pipe": (os.mkfifo, "is not a file"),
}
"""A chat.json, and the error."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_that_is_no_list_is_refused_in_one_line(project, name):
    data, message = REFUSED[name]
    path = project.source / "chat.json"
    path.unlink()
    path.write_bytes(data) if isinstance(data, bytes) else data(path)
    (line,) = project.build(code=1 if isinstance(data, bytes) else 2).splitlines()
    assert re.search(rf"^precompute: error: .*{message}", line)
    assert not (project.cache / "zarr.json").exists()


RECORDS = [
    {"video": "b.mp4", "caption": 'A, "b".\nc'},
    {"video": "a.mp4", "caption": "2"},
    {"video": "in/c d.webm", "caption": None},
]
CSV = 'video,caption\nb.mp4,"A, ""b"".\nc"\na.mp4,2\nin/c d.webm,\n'
TABLES = {
    "CSV": CSV,
    "CSV, CRLF": CSV.rstrip().replace("\n", "\r\n").replace('".\r\nc', '".\nc'),
    "JSON Lines": "\ufeff" + "\r\n\n".join(map(json.dumps, RECORDS)),
}


def texts_of(source: Source) -> list[tuple[str, str, str | None]]:
    return [
        (row["id"], row["uri"], caption_of(row["conversations"])) for row in plan_table(source.samples()).to_pylist()
    ]


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_keep_their_order_and_texts(tmp_path, name):
    found = texts_of(listed(tmp_path, "table", TABLES[name], VIDEOS))
    assert found == [(each["video"], each["video"], each["caption"]) for each in RECORDS]


@pytest.mark.parametrize(
    ("head", "fields"), [("file_name,text", {}), ("jpg,caption", {}), ("x,y", {"image": "x", "caption": "y"})]
)
def test_usual_columns_are_found_and_others_are_named(tmp_path, head, fields):
    assert texts_of(listed(tmp_path, "table", f"{head}\na.b,C\n", **fields)) == [("a.b", "a.b", "C")]


def test_extra_columns_have_the_types_of_their_values(tmp_path):
    """A number of a CSV is one if it is written as in JSON: 007 is a text."""
    text = "id,video,clip_start,score,code,empty\n1,a.mp4,0,1,007,\n2,a.mp4,2.5,2,08,x\n"
    plan = plan_table(listed(tmp_path, "table", text, VIDEOS, extra=["clip_start", "score", "code", "empty"]).samples())
    found = plan.select(["clip_start", "score", "code", "empty"]).to_pydict()
    assert [*found.values()] == [[0.0, 2.5], [1, 2], ["007", "08"], [None, "x"]]


def test_files_lie_beside_the_table_or_elsewhere(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media/a.png").write_bytes(image_bytes(1))
    source = listed(tmp_path, "table", "image\nmedia/a.png\ngone.png\n")
    assert [each == MISSING for each in plan_table(source.samples())["fingerprint"].to_pylist()] == [False, True]
    assert source.read("media/a.png") == image_bytes(1)
    config = SourceConfig(kind="table", path=str(tmp_path / "list.txt"), images=str(tmp_path / "media"))
    assert open_source(config).read("a.png") == image_bytes(1)


BROKEN: dict[str, tuple[str | bytes, dict[str, object], str]] = {
    "only a head": ("video,caption\n", {}, "the source holds no samples"),
    "no column of files": ("name;caption\na.mp4;x\n", {}, r"row 0 .*video.*source.fields.image.* name;caption"),
    "a missing name": ("video,caption\na.mp4,x\n,y\n", {}, r"row 1 \(counted from 0\) names no video"),
    "too many values": ("video,caption\na.mp4,x,y\n", {}, "row 0 .*more than 2 values"),
    "other bytes": (b"video,caption\na.mp4,\xff\n", {}, "not a CSV in UTF-8: .*0xff"),
    "starts that are not named": ("video,clip_start\na.mp4,1\n", {}, r"--source.fields.extra '\[clip_start\]'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_in_one_line(tmp_path, name):
    text, fields, message = BROKEN[name]
    with pytest.raises(SourceError, match=message) as raised:
        plan_table(listed(tmp_path, "table", text, VIDEOS, **fields).samples())
    assert "\n" not in str(raised.value)
