"""Parquet files of images as a source, written by Hugging Face datasets and by Arrow."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store import open_cache
from cache_store.errors import EncodeOnceError, SourceError
from precompute.images.rejected import Rejected
from precompute.sources import Source, SourceConfig, open_source
from precompute.sources.archives.archive import MISSING
from precompute.sources.fields import FieldNames, captioned
from precompute.sources.parquet import ImageTable
from tests.precompute.conftest import image_bytes, plan_table
from tests.precompute.sources.pictures import assert_same_as_of_a_folder

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def opened(path: Path, **fields: str) -> Source:
    return open_source(SourceConfig(kind="parquet", path=str(path), fields=FieldNames(**fields)))


def rows_of(source: Source) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = plan_table(source.samples()).to_pylist()
    return rows


def write_dataset(path: Path, *numbers: int) -> None:
    """As `datasets` writes images with texts."""
    datasets.disable_progress_bars()
    features = {"image": datasets.Image(), "id": datasets.Value("int64"), "text": datasets.Value("string")}
    columns = {
        "image": [{"bytes": image_bytes(number), "path": f"{number}.png"} for number in numbers],
        "id": numbers,
        "text": [f"Picture {number}." for number in numbers],
    }
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path, batch_size=3)


def write_table(path: Path, group: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def test_rows_give_the_latents_of_a_folder_and_grow(project, forked_workers):
    """Rows stay when a file comes before the others, and one whose time alone has changed is still the same."""
    project.settings = {"source": {"kind": "parquet", "path": str(project.folder / "data/*.parquet")}}
    write_dataset(project.folder / "data/train-1.parquet", 9, 1, 2)
    write_dataset(project.folder / "data/train-2.parquet", 3, 4, 5, 6, 7)
    project.build(run__workers=2, store__samples_per_shard=3)
    write_dataset(project.folder / "data/train-0.parquet", 8, 10)
    assert "2 new" not in project.build("--extend", store__samples_per_shard=3)
    os.utime(project.folder / "data/train-2.parquet")
    assert "10 images read again; every" in project.build("--check-sources", store__samples_per_shard=3)
    order = [9, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    ours, rows = open_cache(project.cache), np.arange(len(order))
    assert ours.samples(rows, ["id", "uri"]).slice(0, 1).to_pylist() == [{"id": "9", "uri": "train-1.parquet/0"}]
    assert ours.samples(rows, ["id"])["id"].to_pylist() == [str(number) for number in order]
    assert_same_as_of_a_folder(project, order)


TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize("large", [False, True])
def test_columns_are_found_by_usual_names_or_by_those_given(tmp_path, large):
    """Conversations before captions; no ids are file and row; text and bytes of either of Arrow's widths."""
    text, binary = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    turns = (pa.large_list if large else pa.list_)(pa.struct([("from", text), ("value", text), ("more", pa.int8())]))
    columns = {
        "jpg": pa.array([b"a", b"b", b"a", None], binary),
        "caption": pa.array(["no", " B ", None, ""], text),
        "conversations": pa.array([TURNS, None, None, []], turns),
        "name": pa.array([*"wxyz"], text),
        "other": pa.array([{"bytes": each} for each in (b"1", b"2", b"3", None)], pa.struct([("bytes", binary)])),
    }
    path = write_table(tmp_path / "a.parquet", group=3, **columns)
    source = opened(path)
    rows = rows_of(source)
    assert [row["id"] for row in rows] == [row["uri"] for row in rows] == [f"a.parquet/{row}" for row in range(4)]
    assert [row["conversations"] for row in rows] == [TURNS, captioned("B"), [], []]
    assert [source.read(row["uri"]) for row in rows[:3]] == [b"a", b"b", b"a"]
    given = opened(path, image="other", id="name", caption="name")
    assert [row["id"] for row in rows_of(given)] == [*"wxyz"]
    assert [given.read(row["uri"]) for row in rows_of(given)[:3]] == [b"1", b"2", b"3"]
    assert rows_of(given)[1]["conversations"] == captioned("x")
    for each in (source, given):
        with pytest.raises(Rejected, match="missing: a.parquet/3 holds no bytes of an image"):
            each.read("a.parquet/3")


def test_a_row_group_is_read_once_for_its_images(tmp_path, monkeypatch):
    """By threads that read neighbours, and a few times where one of them lags: not for each of 100 images."""
    data, groups, images = [bytes([number % 251]) * 2_000 for number in range(500)], Counter[int](), ImageTable.images
    monkeypatch.setattr(ImageTable, "images", lambda table, group: (groups.update([group]), images(table, group))[1])
    source = opened(write_table(tmp_path / "a.parquet", image=pa.array(data)))
    uris = [row["uri"] for row in rows_of(source)]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(source.read, uris)] == data
    assert {*groups} == {*range(5)}
    assert groups.total() < 50


def test_rows_that_are_none_are_missing(tmp_path):
    source = opened(write_table(tmp_path / "a.parquet", image=[b"a"]))
    assert source.fingerprint("a.parquet/0") != MISSING
    for uri in ("", "a.parquet", "../a.parquet/0", *(f"a.parquet/{row}" for row in ("1", "-1", "x", "9" * 99))):
        assert source.fingerprint(uri) == MISSING
        with pytest.raises(Rejected, match="missing: .* is no row of the source"):
            source.read(uri)


@pytest.mark.parametrize("change", ["written again", "gone"])
def test_a_file_that_changes_meanwhile_stops_the_build(tmp_path, change):
    path = write_table(tmp_path / "a.parquet", image=[b"a"])
    source = opened(path)
    path.unlink()
    if change == "written again":
        write_table(path, image=[b"a", b"b"])
    with pytest.raises(SourceError, match=r"a.parquet (was changed while it was read|is missing)"):
        source.read("a.parquet/0")


def test_images_that_cannot_be_had_are_rejected_by_themselves(project):
    """None, no bytes but a path of this machine, no image; the next sample is cached."""
    hostile = [None, {"bytes": None, "path": str(project.images)}, {"bytes": b"", "path": None}, {"bytes": b"text"}]
    images = pa.array([*hostile, {"bytes": image_bytes(1)}], IMAGE)
    path = write_table(project.folder / "a.parquet", image=images, id=[*"abcde"])
    project.build(source={"kind": "parquet", "path": str(path)}, run__max_reject_fraction=0.9)
    cache = open_cache(project.cache)
    assert cache.samples(np.arange(1))["id"].to_pylist() == ["e"]
    assert cache.seal.reasons == {"cannot decode": 2, "missing": 2}


TURN = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"photo": [b"a"]}, "has no column image or img .*set source.fields.image .*columns: photo$"),
    "images as text": ({"image": ["a.jpg"]}, "a column image of type string, expected a struct of bytes and path"),
    "images in lists": ({"image": [[b"a"]]}, "a column image of type list<.*>, expected a struct"),
    "an id that is a number with a fraction": ({"image": [b"a"], "id": [0.5]}, "a column id of type double"),
    "a row without an id": ({"image": [b"a"] * 2, "id": ["a", None]}, "row 1 has no id"),
    "an id that comes twice": ({"image": [b"a"] * 2, "id": ["a", "a"]}, r"1 sample id came more than once: a \("),
    "captions in lists": ({"image": [b"a"], "caption": [["a"]]}, "a column caption of type list"),
    "turns that are text": ({"image": [b"a"], "conversations": ["a"]}, "expected lists of structs of from and value"),
    "a turn without a speaker": (
        {"image": [b"a"], "conversations": pa.array([[{"value": "a"}]], TURN)},
        r"a.parquet: row 0: conversations: \[0\].from: expected `str`, got `null`",
    ),
}
"""A file's columns, and what is said of it."""


@pytest.mark.parametrize("name", HOSTILE)
def test_other_columns_are_refused_in_one_line(tmp_path, name):
    columns, message = HOSTILE[name]
    with pytest.raises(EncodeOnceError, match=message) as caught:
        rows_of(opened(write_table(tmp_path / "a.parquet", **columns)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "once" in name or "twice" in name


def test_row_groups_of_much_text_are_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("precompute.sources.parquet.MAX_TEXT_BYTES", 1_000)
    source = opened(write_table(tmp_path / "a.parquet", image=[b"a"], id=["x" * 2_000]))
    with pytest.raises(SourceError, match=r"row group 0 holds [0-9,]+ bytes of texts, more than 1,000; write"):
        rows_of(source)


def test_an_id_that_is_a_text_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"a sample id of 20,000 bytes, more than 16,384, begins x{20}$"):
        rows_of(opened(write_table(tmp_path / "a.parquet", image=[b"a"], id=["x" * 20_000])))


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    path = write_table(tmp_path / "a.parquet", image=[b"a"], title=["A"])
    with pytest.raises(SourceError, match=r"has no column tilte; set source.fields.caption .*columns: image, title$"):
        opened(path, caption="tilte")


PEAK = """
import resource, sys
from precompute.sources import SourceConfig, open_source
source = open_source(SourceConfig(kind="parquet", path=sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = [len(source.read(row["uri"])) for row in source.samples()]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 2**10, *sizes, sep="\\n")
"""


def test_images_take_the_memory_of_a_row_group_and_of_a_page(tmp_path, monkeypatch):
    """A page is in memory while its images become bytes; a row group of one image that is too large is not read."""
    many, large = [bytes([number]) * 2**24 for number in range(8)], [bytes(2**28 + 1)]
    growth, *sizes = read_apart(write_table(tmp_path / "a.parquet", image=many, id=[*range(8)]))
    assert sizes == [str(2**24)] * 8
    assert int(growth) < 2.6 * 128
    source = opened(write_table(tmp_path / "b.parquet", image=large))
    monkeypatch.setattr(ImageTable, "images", None)
    with pytest.raises(Rejected, match="too large: b.parquet/0 is 268,435,"):
        source.read("b.parquet/0")


def read_apart(path: Path) -> list[str]:
    """In a process of its own: by how many MiB its memory grew, and the size of each image."""
    return subprocess.check_output([sys.executable, "-c", PEAK, str(path)], text=True, timeout=300).splitlines()


def test_files_that_are_cut_or_claim_too_much_are_refused(tmp_path, monkeypatch):
    """One that unpacks to 5 GB is, in the memory of one of its values."""
    path = write_table(tmp_path / "a.parquet", image=[b"a" * 5_000])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SourceError, match=r"a.parquet is damaged: it is not a complete Parquet file$"):
        opened(path)
    bomb = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500_000, np.int32)), pa.array([bytes(10_000)]))
    pq.write_table(pa.table({"image": bomb}), path, row_group_size=10**6, store_schema=False)
    source = opened(path)
    with pytest.raises(SourceError, match=r"row group 0 holds more than 671,088,640 bytes of images"):
        source.read("a.parquet/0")
    monkeypatch.setattr("precompute.sources.parquet.MAX_HELD_BYTES", 1_000)
    assert opened(write_table(path, image=[os.urandom(6_000)] * 2)).read("a.parquet/1"), "as large in the file"
    source = opened(write_table(path, image=[bytes([n]) * 20_000 for n in range(2)]))
    with pytest.raises(SourceError, match=r"row group 0 holds 4.* more than 1,000; write the file again with smaller"):
        source.read("a.parquet/0")
