"""Tars in WebDataset's form as a source, written by webdataset itself where they are sound."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from cache_store import open_cache
from cache_store.errors import EncodeOnceError, MissingPathError, SourceError
from precompute.images.rejected import Rejected
from precompute.sources import Source, SourceConfig, open_source
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.tar import read_index
from precompute.sources.fields import FieldNames, captioned
from precompute.sources.webdataset import TARS_HELD
from tests.precompute.conftest import Project, image_bytes, plan_table
from tests.precompute.sources.pictures import assert_same_as_of_a_folder
from tests.precompute.sources.test_archives import NOTHING, A, make_tar, member


def write_tar(path: Path, samples: Mapping[str, Mapping[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path), mtime=1.0) as writer:
        for key, parts in samples.items():
            writer.write({"__key__": key, **parts})
    return path


def numbered(*numbers: int) -> dict[str, dict[str, Any]]:
    return {f"{number:09d}": {"png": image_bytes(number), "txt": f"Picture {number}."} for number in numbers}


def opened(path: Path, **fields: str) -> Source:
    return open_source(SourceConfig(kind="webdataset", path=str(path), fields=FieldNames(**fields)))


def rows_of(source: Source) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = plan_table(source.samples()).to_pylist()
    return rows


TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


def test_members_of_one_key_are_a_sample_with_its_text(tmp_path):
    """In the order of the tars: the text is the .json's conversations, the .txt, or the .json's caption."""
    image = image_bytes(1)
    write_tar(
        tmp_path / "00001.tar", {"2": {"png": image, "txt": " B \n", "json": {"caption": "no"}}, "1": {"PNG": image}}
    )
    first = {"jpg": image, "txt": "no", "json": {"conversations": TURNS, "width": 3}, "cls": 7}
    more = {
        "in/3": {"webp": image, "json": {"caption": "C", "url": None}},
        "4": {"txt": "without an image"},
        ".hidden": {"jpg": image},
    }
    write_tar(tmp_path / "00000.tar", {"9": first, **more, "5": {"jpg": image, "json": {"caption": None}}})
    (tmp_path / "00000_stats.json").write_text("{}")
    source = opened(tmp_path)
    samples = source.samples()
    rows = plan_table(samples).to_pylist()
    assert [row["id"] for row in rows] == ["9", "in/3", "5", "2", "1"]
    assert [row["uri"] for row in rows][::3] == ["00000.tar/9.jpg", "00001.tar/2.png"]
    assert [row["conversations"] for row in rows] == [TURNS, captioned("C"), [], captioned("B"), []]
    assert samples.passed_over == (
        "passed over: 2 files that are no images by their names (.cls 1, .txt 1); "
        "1 hidden file (names that begin with a dot)"
    )
    assert all(source.read(row["uri"]) == image and source.fingerprint(row["uri"]) != MISSING for row in rows)


def test_tars_give_the_latents_of_a_folder_and_grow(project, forked_workers):
    """Rows stay when a tar comes before the others, and one whose time alone has changed is still the same."""
    project.settings = {"source": {"kind": "webdataset", "path": str(project.folder / "tars")}}
    for number, numbers in enumerate(((9, 1, 2), (3, 4, 5, 6, 7))):
        write_tar(project.folder / f"tars/{number + 1:05d}.tar", numbered(*numbers))
    project.build(run__workers=2, store__samples_per_shard=3)
    write_tar(project.folder / "tars/00000.tar", numbered(8, 10))
    assert "new sample                000000008" in project.build(code=1, store__samples_per_shard=3)
    project.build("--extend", store__samples_per_shard=3)
    os.utime(project.folder / "tars/00001.tar")
    assert "10 images read again; every" in project.build("--check-sources", store__samples_per_shard=3)
    order = [9, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    ours, rows = open_cache(project.cache), np.arange(len(order))
    assert ours.samples(rows, ["id"])["id"].to_pylist() == [f"{number:09d}" for number in order]
    assert_same_as_of_a_folder(project, order)
    with project.same_in_the_end():
        project.lose("latents/c/1/0/0/0")
        project.repair("--shards", "1")


def test_a_tar_that_goes_meanwhile_stops_the_build(tmp_path):
    write_tar(tmp_path / "a.tar", numbered(1))
    write_tar(tmp_path / "b.tar", numbered(2))
    uri = rows_of(opened(tmp_path))[1]["uri"]
    source = opened(tmp_path)
    (tmp_path / "b.tar").rename(tmp_path / "c.tar")
    with pytest.raises(SourceError, match=r"b.tar is gone; restore it"):
        source.read(uri)
    source = opened(tmp_path)
    assert source.fingerprint(uri) == MISSING
    with pytest.raises(Rejected, match=r"missing: b.tar/000000002.png is in no tar of the source"):
        source.read(uri)


def test_a_tar_that_is_replaced_meanwhile_stops_the_build(tmp_path):
    """Also one that is opened again, as each is of more than are held."""
    for number in range(TARS_HELD + 1):
        write_tar(tmp_path / f"{number}.tar", numbered(number))
    source = opened(tmp_path)
    uri = rows_of(source)[0]["uri"]
    write_tar(tmp_path / "new.tar", {"000000000": {"png": image_bytes(9)}}).replace(tmp_path / "0.tar")
    with pytest.raises(SourceError, match=r"0.tar was changed while it was read"):
        source.read(uri)


def test_neighbours_in_a_tar_cost_one_index(tmp_path, monkeypatch):
    indexed = Counter[str]()
    monkeypatch.setattr(
        "precompute.sources.archives.tar.read_index",
        lambda file, texts: (indexed.update([Path(file.where).name]), read_index(file, texts))[1],
    )
    for number in range(8):
        write_tar(tmp_path / f"{number}.tar", numbered(*range(3 * number, 3 * number + 3)))
    rows = rows_of(opened(tmp_path))
    assert indexed.pop("0.tar") == 1
    assert set(indexed.values()) == {1}
    source = opened(tmp_path)
    indexed.clear()
    for row in rows:
        source.read(row["uri"])
    assert {*indexed.values()} == {1}


def test_the_image_of_several_is_named_by_its_extension(tmp_path):
    write_tar(tmp_path / "a.tar", {"1": {"jpg": b"photo", "seg.png": b"mask"}, "2": {"jpg": b"photo"}})
    source = opened(tmp_path, image=".SEG.png")
    samples = source.samples()
    (row,) = samples
    assert source.read(str(row["uri"])) == b"mask"
    assert samples.passed_over == "passed over: 1 image of another extension than source.fields.image"
    with pytest.raises(SourceError, match=r"a.tar/1 has 2 images \(jpg, seg.png\).* --source.fields.image jpg$"):
        rows_of(opened(tmp_path))


PATTERNS = {
    "a": ["0.tar", "1.tar", "deep/2.tar"],
    "a/1.tar": ["1.tar"],
    "a/*.tar": ["0.tar", "1.tar"],
    "*/{1..1}.tar": ["a/1.tar", "b/1.tar"],
    "{a,b}/[0-9].tar": ["a/0.tar", "a/1.tar", "b/1.tar"],
    "a/{00..01}{,x}.tar": "00.tar does not exist",
    "a/{0..2}.tar": "a/2.tar does not exist",
    "a/{0..1}.t?": "does not exist",
    "a/none*": "does not exist",
    "d[1]{2}": ["3.tar"],
    "d[1]{2}/{0..3}.tar": "0.tar does not exist",
    "d[1]{2}/*.tar": ["3.tar"],
    "nowhere": "nowhere does not exist",
    "c": "c holds no .tar file",
    "{0..999999}{0..9}": "0 does not exist",
}
"""A path, and the tars that it stands for or what is said."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_path_is_a_tar_a_folder_or_a_pattern(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    for number, name in enumerate(("a/0.tar", "a/1.tar", "a/deep/2.tar", "b/1.tar", "d[1]{2}/3.tar", "b/tar")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tar(tmp_path / name, numbered(number))
    expected = PATTERNS[pattern]
    if isinstance(expected, str):
        with pytest.raises(MissingPathError, match=rf"^source.path: .*{expected}$"):
            opened(Path(pattern))
    else:
        assert [row["uri"].rpartition("/")[0] for row in rows_of(opened(Path(pattern)))] == expected


LONG = b'{"a": ' * 100_000
HOSTILE: dict[str, tuple[bytes, str]] = {
    "cut in a file": (member("a.jpg", bytes(5_000))[:1_024], "a.tar is not a tar"),
    "cut between members": (A, "a.tar is damaged or cut short"),
    "empty": (b"", "a.tar is not a tar that can be read"),
    "compressed": (b"\x1f\x8b\x08" + bytes(600), "is compressed by gzip, so it cannot be read in place"),
    "without images": (member("a.txt", b"A") + NOTHING, r"holds no samples; passed over: 1 file .*\(.txt 1\)"),
    "a caption in latin-1": (
        A + member("a.txt", b"caf\xe9") + NOTHING,
        "a.txt is not UTF-8 text: byte 3 is 0xe9; mend",
    ),
    "a caption that is a link": (
        A + member("a.txt", kind=b"2", linked_to="/etc/passwd") + NOTHING,
        "a.tar/a.txt cannot be read: .* is a link",
    ),
    "a caption of 17 MB": (A + member("a.txt", b"x" * 17 * 2**20) + NOTHING, "be read: a.txt is 17,825,792 bytes"),
    "a caption that comes twice": (A + member("a.txt", b"x") * 2 + NOTHING, "be read: a.txt occurs 2 times in .*a.tar"),
    "a list": (A + member("a.json", b"[]") + NOTHING, "a.tar/a.json: expected `object`, got `array`"),
    "a caption that is a number": (A + member("a.json", b'{"caption": 7}') + NOTHING, "a.json: caption: expected `str"),
    "a cut object": (A + member("a.json", b'{"caption": "') + NOTHING, "a.json: .*truncated; expected an object"),
    "objects in objects": (A + member("a.json", LONG) + NOTHING, "a.json: is nested too deeply"),
    "turns without a speaker": (
        A + member("a.json", b'{"conversations": [{}]}') + NOTHING,
        "json: it lacks a field, conversations.*from;",
    ),
    "half a character": (A + member("a.json", b'{"caption": "\\ud800"}') + NOTHING, "a.json: .*truncated"),
    "a key in two tars": (A + NOTHING, r"1 sample id came more than once: a \(first with the images \S+, \S+\); give"),
}
"""What a tar is, and what is said of it."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tar_that_cannot_be_planned_is_refused_in_one_line(tmp_path, name):
    data, message = HOSTILE[name]
    (tmp_path / "a.tar").write_bytes(data)
    if "two" in name:
        shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    with pytest.raises(EncodeOnceError, match=message) as caught:
        rows_of(opened(tmp_path))
    assert "\n" not in str(caught.value)


def test_images_that_cannot_be_had_are_rejected_by_themselves(project: Project):
    """A link, an image that comes twice, an empty one; the next sample is cached."""
    hostile = [("twice.png", image_bytes(0)), ("twice.png", image_bytes(1)), ("empty.png", b""), ("../up.png", b"x")]
    make_tar(project.folder / "a.tar", [*hostile, ("sound.png", image_bytes(2))])
    data = (project.folder / "a.tar").read_bytes()
    (project.folder / "a.tar").write_bytes(member("link.png", kind=b"2", linked_to="/etc/passwd") + data)
    source = {"kind": "webdataset", "path": str(project.folder / "a.tar")}
    project.build(source=source, run__max_reject_fraction=0.9)
    cache = open_cache(project.cache)
    assert cache.samples(np.arange(1))["id"].to_pylist() == ["sound"]
    assert cache.seal.reasons == {"ambiguous archive member": 1, "cannot decode": 2, "damaged archive member": 1}
    assert json.loads((project.cache / "build.json").read_text())["config"]["source"]["path"] == source["path"]
    assert "1 of 5 samples without an image: a.tar/twice.png; looked in" in project.build(
        source=source, name="other", code=1, run__max_reject_fraction=0.1
    )


def test_a_pattern_is_remembered_as_an_absolute_one(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    write_tar(project.folder / "tars/0.tar", numbered(1, 2))
    project.build(source={"kind": "webdataset", "path": "tars/{0..0}.tar"})
    remembered = json.loads((project.cache / "build.json").read_text())["config"]["source"]["path"]
    assert remembered == str(project.folder / "tars/{0..0}.tar")
    monkeypatch.chdir("/")
    with project.same_in_the_end():
        project.repair("--shards", "0")


@pytest.mark.parametrize("kind", ["llava", "folder", "cache"])
def test_a_field_that_a_kind_has_not_is_wrong_usage(project, kind):
    said = project.build(code=2, source={"kind": kind, "path": "source", "fields": {"image": "jpg"}})
    assert re.search(f"source.fields.image says nothing of kind {kind}", said)
