"""Tars in WebDataset's form as a source; webdataset itself writes the sound ones."""

import shutil
from pathlib import Path

import pytest

from cache_store.errors import ConfigError, EncodeOnceError, MissingPathError, SourceError
from cache_store.format.plan import caption_of
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
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a caption that is a link": (A + member("a.txt", kind=b"2", linked_to="/etc") + NOTHING, "a.tar/a.txt .*is a link"),
    "objects in objects": (A + member("a.json", LONG) + NOTHING, "a.json: is nested too deeply"),
    "a key in two tars": (A + NOTHING, r"1 sample id came more than once: a \(first with the images \S+, \S+\); give"),
}
"""A tar, and the error."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tar_that_cannot_be_planned_is_refused_in_one_line(tmp_path, name):
    data, message = HOSTILE[name]
    (tmp_path / "a.tar").write_bytes(data)
    if "two" in name:
        shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    with pytest.raises(EncodeOnceError, match=message) as caught:
        rows_of(opened("webdataset", tmp_path))
    assert "\n" not in str(caught.value)
