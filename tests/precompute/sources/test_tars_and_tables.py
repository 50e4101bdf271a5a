"""Tars in WebDataset's form, which webdataset itself writes, and Parquet tables of images as a source."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.errors import ConfigError, EncodeOnceError, MissingPathError, SourceError
from cache_store.format.plan import caption_of
from precompute.images.rejected import Rejected
from precompute.sources.fields import conversation_of
from precompute.sources.listing import HIDDEN, MASK, NOT_UTF8
from precompute.sources.place import MISSING
from tests.precompute.conftest import image_bytes, plan_table
from tests.precompute.sources.pictures import numbered, opened, rows_of, write_tar
from tests.precompute.sources.test_archives import NOTHING, A, fetch, member

TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


def test_members_of_one_key_are_a_sample_with_its_text(tmp_path):
    """The text is the .json's conversations, else the .txt, else the .json's caption."""
    image = image_bytes(1)
    write_tar(
        tmp_path / "00001.tar",
        {"2": {"png": image, "txt": " B \n", "json": {"caption": "no"}}, "1": {"PNG": image, "txt": "\r\n"}},
    )
    first = {"jpg": image, "txt": "no", "json": {"conversations": TURNS, "width": 3}, "cls": 7}
    more = {
        "in/3": {"webp": image, "json": {"caption": "C", "url": None}},
        "4": {"txt": "without an image"},
        ".hidden": {"jpg": image},
    }
    write_tar(tmp_path / "00000.tar", {"9": first, **more, "5": {"jpg": image, "json": {"caption": None}}})
    (tmp_path / "00000_stats.json").write_text("{}")
    source = opened("webdataset", tmp_path)
    samples = source.samples()
    rows = plan_table(samples).to_pylist()
    assert [row["id"] for row in rows] == ["9", "in/3", "5", "2", "1"]
    assert [row["uri"] for row in rows][::3] == ["00000.tar/9.jpg", "00001.tar/2.png"]
    assert [row["conversations"] for row in rows] == [TURNS, *map(conversation_of, ("C", None, " B ", ""))]
    assert samples.skipped == {".cls": 1, ".txt": 1, HIDDEN: 1, NOT_UTF8: 0}
    assert all(fetch(source, row["uri"]) == image and source.locate(row["uri"]).fingerprint != MISSING for row in rows)


def test_a_tar_that_is_replaced_meanwhile_stops_the_build(tmp_path):
    write_tar(tmp_path / "0.tar", numbered(0))
    source = opened("webdataset", tmp_path)
    write_tar(tmp_path / "new.tar", {"000000000": {"png": image_bytes(9)}}).replace(tmp_path / "0.tar")
    with pytest.raises(SourceError, match=r"0.tar was changed while it was read"):
        source.version()


def test_the_image_of_several_is_named_by_its_extension(tmp_path):
    several = {"jpg": b"photo", "seg.png": b"mask", "txt": "A"}
    write_tar(tmp_path / "a.tar", {"1": several, "2": {"jpg": b"photo"}})
    source = opened("webdataset", tmp_path, image=".SEG.png")
    samples = source.samples()
    (row,) = samples
    assert fetch(source, str(row["uri"])) == b"mask"
    assert row["conversations"] == conversation_of("A")
    assert +samples.skipped == {".jpg": 1}
    write_tar(tmp_path / "a.tar", {"1": several, "2": several})
    with pytest.raises(SourceError, match=r"a.tar/1 has 2 images \(jpg, seg.png\).* --source.fields.image"):
        rows_of(opened("webdataset", tmp_path))


def test_a_text_belongs_to_the_image_of_the_same_name(tmp_path):
    """A key ends at the first dot, as webdataset has it; two images of one key are refused."""
    image, names = image_bytes(1), ["a photo v1.5", "b.c.d", "e", "f-masklabel"]
    members = {name: {"jpg": image, "txt": name, "json": {"caption": "no"}} for name in names}
    write_tar(tmp_path / "a.tar", members | {"g.h": {"jpg": image, "json": {"caption": "G"}}})
    samples = opened("webdataset", tmp_path).samples()
    captions = {row["id"]: caption_of(row["conversations"]) for row in plan_table(samples).to_pylist()}
    assert captions == {"a photo v1": "a photo v1.5", "b": "b.c.d", "e": "e", "g": "G"}
    assert +samples.skipped == {MASK: 1}
    write_tar(tmp_path / "b.tar", {"IMG.2024.01": members["e"], "IMG.2024.02": members["e"]})
    with pytest.raises(SourceError, match=r"2 images \(2024.01.jpg, 2024.02.jpg\).*--source.kind folder"):
        rows_of(opened("webdataset", tmp_path / "b.tar"))


PATTERNS = {
    "a": ["0.tar", "1.tar", "deep/2.tar"],
    "a/1.tar": ["1.tar"],
    "a/*.tar": ["0.tar", "1.tar"],
    "*/{1..1}.tar": ["a/1.tar", "b/1.tar"],
    "a/{0..2}.tar": "a/2.tar does not exist",
    "**/*.tar": "name the folder",
    "c": "c holds no .tar file",
}
"""A path, and the tars that it matches, or the error."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_path_is_a_tar_a_folder_or_a_pattern(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    for number, name in enumerate(("a/0.tar", "a/1.tar", "a/deep/2.tar", "b/1.tar")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tar(tmp_path / name, numbered(number))
    expected = PATTERNS[pattern]
    if isinstance(expected, str):
        with pytest.raises((MissingPathError, ConfigError), match=rf"^source.path: .*{expected}"):
            opened("webdataset", Path(pattern))
    else:
        assert [row["uri"].rpartition("/")[0] for row in rows_of(opened("webdataset", Path(pattern)))] == expected


LONG = b'{"a": ' * 100_000
TARS: dict[str, tuple[bytes, str]] = {
    "a caption that is a link": (A + member("a.txt", kind=b"2", linked_to="/etc") + NOTHING, "a.tar/a.txt .*is a link"),
    "objects in objects": (A + member("a.json", LONG) + NOTHING, "a.json: is nested too deeply"),
    "a key in two tars": (A + NOTHING, r"1 sample id came more than once: a \(first with the images \S+, \S+\); give"),
}
"""A tar, and the error."""


@pytest.mark.parametrize("name", TARS)
def test_a_tar_that_cannot_be_planned_is_refused_in_one_line(tmp_path, name):
    data, message = TARS[name]
    (tmp_path / "a.tar").write_bytes(data)
    if "two" in name:
        shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    with pytest.raises(EncodeOnceError, match=message) as caught:
        rows_of(opened("webdataset", tmp_path))
    assert "\n" not in str(caught.value)


# Tables, as Hugging Face datasets and Arrow write them.


def write_table(path: Path, group: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


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
COLUMNS: dict[str, tuple[Any, ...]] = {
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


@pytest.mark.parametrize("name", COLUMNS)
def test_other_columns_are_refused_in_one_line(tmp_path, name):
    columns, message, *fields = COLUMNS[name]
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
