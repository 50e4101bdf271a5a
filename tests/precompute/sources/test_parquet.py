"""Parquet files of images as a source, written by Hugging Face datasets and by Arrow."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.fields import conversation_of
from precompute.sources.place import MISSING
from tests.precompute.sources.pictures import opened, rows_of


def write_table(path: Path, group: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize("large", [False, True])
def test_columns_are_found_by_usual_names_or_by_those_given(tmp_path, large):
    """Conversations win over captions; ids default to file and row; both widths of Arrow's text and bytes are read."""
    text, binary = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    turns = (pa.large_list if large else pa.list_)(pa.struct([("from", text), ("value", text), ("more", pa.int8())]))
    columns = {
        "jpg": pa.array([b"a", b"b", b"a", None], binary),
        "caption": pa.array(["no", " B ", None, ""], text),
        "conversations": pa.array([TURNS, None, None, None], turns),
        "name": pa.array([*"wxyz"], text),
        "other": pa.array([{"bytes": each} for each in (b"1", b"2", b"3", None)], pa.struct([("bytes", binary)])),
    }
    path = write_table(tmp_path / "a.parquet", group=3, **columns)
    source = opened("parquet", path)
    rows = rows_of(source)
    assert [row["id"] for row in rows] == [row["uri"] for row in rows] == [f"a.parquet/{row}" for row in range(4)]
    assert [row["conversations"] for row in rows] == [TURNS, *map(conversation_of, (" B ", None, ""))]
    assert [source.read(row["uri"]) for row in rows[:3]] == [b"a", b"b", b"a"]
    given = opened("parquet", path, image="other", id="name", caption="name")
    assert [row["id"] for row in rows_of(given)] == [*"wxyz"]
    assert [given.read(row["uri"]) for row in rows_of(given)[:3]] == [b"1", b"2", b"3"]
    assert rows_of(given)[1]["conversations"] == conversation_of("x")
    for each in (source, given):
        with pytest.raises(Rejected, match="no image: a.parquet/3 holds no bytes"):
            each.read("a.parquet/3")


def test_a_path_in_place_of_bytes_opens_no_file(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": str(tmp_path / "secret.png")}], struct)
    with pytest.raises(Rejected, match="no image: a.parquet/0 holds no bytes"):
        opened("parquet", write_table(tmp_path / "a.parquet", image=images)).read("a.parquet/0")


def test_rows_that_are_none_are_missing(tmp_path):
    source = opened("parquet", write_table(tmp_path / "a.parquet", image=[b"a"]))
    assert source.locate("a.parquet/0").fingerprint != MISSING
    for uri in ("", "a.parquet", "../a.parquet/0", *(f"a.parquet/{row}" for row in ("1", "-1", "x", "9" * 99))):
        assert source.locate(uri).fingerprint == MISSING
        with pytest.raises(Rejected, match="missing: .* is no row of the source"):
            source.read(uri)


TURN = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
LATIN_1 = pa.StringArray.from_buffers(1, *pa.array([b"\xe9"]).buffers()[1:])
HOSTILE: dict[str, tuple[Any, ...]] = {
    "no image": ({"photo": [b"a"]}, "has no column image or img .*source.fields.image .* photo "),
    "no column of that name": (
        *({"image": [b"a"], "title": ["A"]}, "no column tilte; source.fields.caption .* title "),
        {"caption": "tilte"},
    ),
    "images in lists": ({"image": [[b"a"]], "n": [1]}, r"of type list<.*>, expected a struct .* n \(int64\)$"),
    "a row without an id": ({"image": [b"a"] * 2, "id": ["a", None]}, "row 1 has no id"),
    "a text that is not UTF-8": ({"image": [b"a"], "caption": LATIN_1}, "a.parquet is damaged"),
    "a turn without a speaker": (
        {"image": [b"a"], "conversations": pa.array([[{"value": "a"}]], TURN)},
        r"a.parquet: row 0: conversations: \[0\].from: expected `str`, got `null`",
    ),
}
"""A file's columns, the error, and perhaps the names of fields."""


@pytest.mark.parametrize("name", HOSTILE)
def test_other_columns_are_refused_in_one_line(tmp_path, name):
    columns, message, *fields = HOSTILE[name]
    with pytest.raises(SourceError, match=message) as caught:
        rows_of(opened("parquet", write_table(tmp_path / "a.parquet", **columns), **dict(*fields)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("claims", [True, False])
def test_a_row_group_that_takes_too_much_is_refused(tmp_path, monkeypatch, claims):
    """One value in many rows claims to take as much as one row."""
    monkeypatch.setattr("precompute.sources.parquet.MAX_GROUP_BYTES", {"images": 10**6, "texts": 10**6})
    one = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([b"a" * 600]))
    table = pa.table({"image": [b"a" * 10**6, b"b"] if claims else one})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False, use_dictionary=not claims)
    source = opened("parquet", tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="row group 0 is too large, with more than 1,000,000 bytes of images"):
        source.read("a.parquet/0")
