"""Sources of every kind: which samples they give, what they skip, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.errors import SourceError
from cache_store.format.plan import caption_of
from precompute.images.decode import content_sha256
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.images import Source
from precompute.sources.media import IMAGES, VIDEOS
from precompute.sources.opening import open_source, recognised
from tests.families import first_and_slow
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.precompute.conftest import image_bytes, plan_table
from tests.precompute.sources.pictures import write_pictures
from tests.precompute.sources.test_archives import fetch


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def tree(folder: Path, files: dict[str, bytes], form: str = "folder") -> Source:
    """Write and open a folder, or an archive of it."""
    write_files(folder, files)
    path = folder if form == "folder" else shutil.make_archive(str(folder), form, folder)
    return open_source(SourceConfig(kind="folder", path=str(path)))


KINDS: dict[str, tuple[str, dict[str, bytes]]] = {
    "llava": ("chat.json", {"chat.json": b"[]"}),
    "table": ("list.CSV", {"list.CSV": b"file_name"}),
    "folder": ("", {"deep/a.png": b"", "b.tar": b""}),
    "folder, as zip": ("a.zip", {"a.zip": b""}),
    "webdataset": ("{00..01}.tar", {}),
    "parquet": ("", {"data/train-0.parquet": b"", "README.md": b""}),
    "cache": ("", {"zarr.json": b"{}", "commits/00000000.json": b"{}"}),
}
"""The path of a source, and files, by its kind."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_source_is_known_by_its_name_or_by_what_it_holds(tmp_path, kind):
    path, files = KINDS[kind]
    write_files(tmp_path, files)
    assert recognised(SourceConfig(path=str(tmp_path / path))).kind == kind.partition(",")[0]


def test_a_build_records_the_kind_that_it_found(project):
    assert "images.zip is read as source.kind folder" in project.build(source={"path": str(project.images)})
    assert json.loads((project.cache / "build.json").read_bytes())["config"]["source"]["kind"] == "folder"
    (project.folder / "list.xyz").write_bytes(b"")
    assert_names(project.build(code=2, source={"path": str(project.folder / "list.xyz")}), "source.kind list.xyz")


TREE = {
    **dict.fromkeys(("photos/a.jpg", "photos/b.PNG", "photos/deep/c.jpg"), b"pixels"),
    "photos/a.txt": b"\xef\xbb\xbf A\n cat \n",
    "photos/b.txt": b"\xef\xbb\xbf\r\n",
    **dict.fromkeys(("photos/._a.jpg", "photos/.DS_Store", ".DS_Store"), b"\0\5\x16\7"),
    **dict.fromkeys(("__MACOSX/._photos", "__MACOSX/photos/deep/c.jpg"), b"\0\5\x16\7"),
    **{f"photos/{name}": b"" for name in ("notes.txt", "c.HEIC", "README", "odd.s%x", "long.abcdefghijklmnop")},
    **{f"photos/{number}.{suffix}": b"" for number in range(2) for suffix in ("eps", "svg", "psd", "ico")},
}
"""Three images, one with a caption and one with an empty one; macOS metadata; and 13 other files."""

OTHERS = ".eps 2, .ico 2, .psd 2, .svg 2, .abcdefghijklmnop 1, without a suffix 1; HEIC"


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_a_tree_gives_images_with_captions_and_counts_the_rest(tmp_path, form):
    """A caption is the file's text without the line break at its end."""
    source = tree(tmp_path / "tree", TREE, form)
    rows = plan_table(source.samples()).to_pylist()
    caption = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": " A\n cat "}]
    empty = [caption[0], {"from": "gpt", "value": ""}]
    expected = {"photos/a.jpg": caption, "photos/b.PNG": empty, "photos/deep/c.jpg": []}
    assert {row["id"]: row["conversations"] for row in rows} == expected
    assert_names(source.samples().note, OTHERS)
    assert fetch(source, "photos/a.jpg") == b"pixels"
    if form != "folder":
        assert fetch(source, "deep/c.jpg") == b"pixels"
        assert source.locate("deep/c.jpg") == source.locate("photos/deep/c.jpg")


def test_links_caches_and_bad_names_in_a_folder_are_skipped_and_counted(tmp_path):
    odd = [os.fsdecode(name) for name in (b"caf\xe9.jpg", b"caf\xe9/a.jpg")]
    source = tree(tmp_path / "images", {"a.jpg": b"x", "elsewhere/b.jpg": b"x", **dict.fromkeys(odd, b"x")})
    (tmp_path / "images" / "deep\n").symlink_to("elsewhere")
    make_cache(tmp_path / "images" / "cache", np.zeros((2, 1, 2, 2), np.float32))
    tree(tmp_path / "images", {"cache/sheets/unusual.png": b"x"})
    assert plan_table(source.samples())["id"].to_pylist() == ["a.jpg", "elsewhere/b.jpg"]
    assert_names(source.samples().note, "cache 1, linked folder 1, not UTF-8 2")


def test_a_folder_lists_videos_or_images_and_counts_the_others(tmp_path):
    """The suffix decides, in upper or lower case; the content does not matter yet."""
    tree(tmp_path, dict.fromkeys(["a.mp4", "B.MOV", "in/d.mkv", "g.jpg", "h.png", "notes.pdf", "a.txt"], b""))
    config = SourceConfig(kind="folder", path=str(tmp_path))
    videos, images = (open_source(config, media).samples() for media in (VIDEOS, IMAGES))
    assert [each["uri"] for each in videos] == ["B.MOV", "a.mp4", "in/d.mkv"]
    assert [each["uri"] for each in images] == ["g.jpg", "h.png"]
    assert_names(videos.note, "no videos .pdf 1")
    assert "clip.frames" in images.note


def test_all_files_that_cannot_be_read_are_named_in_one_message(tmp_path):
    """Texts in Latin-1 beside good ones."""
    bad = [f"{number:02}" for number in range(12)]
    tree(tmp_path, {f"{name}.{suffix}": b"caf\xe9" for name in bad for suffix in ("jpg", "txt")})
    source = tree(tmp_path, {"-good.jpg": b"x", "-good.txt": b"A cat."})
    with pytest.raises(SourceError) as caught:
        plan_table(source.samples())
    first, *named, more = str(caught.value).split("\n  ")
    assert (first, len(named), more) == ("12 files cannot be used:", 10, "and 2 more")
    assert [name for name, line in zip(bad, named, strict=False) if f"{name}." not in line] == []


CAPTIONED: dict[str, tuple[dict[str, str], str]] = {
    "all": ({"a.txt": "A", "b.txt": ""}, ""),
    "one": ({"a.txt": "A"}, "caption 1 sample"),
    "of another tool": ({"a.caption": "A", "b.caption": "B", "b.json": "{}"}, ".caption 2, .json 1 2 samples name.txt"),
    "masks": (
        {"a.txt": "A", "b.txt": "B", "a-masklabel.png": "x", "a-masklabel.txt": "", "b-condlabel.PNG": "x"},
        "",
    ),
}
"""Files beside two images, and what the one warning names, if any."""


@pytest.mark.parametrize("name", CAPTIONED)
def test_missing_captions_are_warned_of_before_the_encoding_and_masks_are_skipped(tmp_path, name):
    files, names = CAPTIONED[name]
    images = {"a.jpg": "x", "b.png": "x"}
    samples = tree(tmp_path, {each: text.encode() for each, text in (images | files).items()}).samples()
    assert plan_table(samples)["id"].to_pylist() == ["a.jpg", "b.png"]
    warnings = [*samples.warnings(SOURCES["folder"].add_texts)]
    assert len(warnings) == bool(names)
    assert_names(warnings, names)
    assert ("mask or condition 2" in samples.note) == (name == "masks")


@pytest.mark.parametrize("kind", first_and_slow(["parquet", "webdataset"]))
def test_tars_and_tables_are_built_and_grow(project, forked_workers, kind):
    """Rows stay when a file comes before the others; a file whose time alone has changed is still the same."""
    data = project.folder / "data"
    project.settings = {"source": {"kind": kind, "path": f"{data}/*.*"}, "store__samples_per_shard": 3}
    write_pictures(kind, data / "1", 9, 1, 2)
    last = write_pictures(kind, data / "2", 3, 4, 5, 6, 7)
    project.build(run__workers=2)
    write_pictures(kind, data / "0", 8, 10)
    assert "new sample" in project.build(code=1)
    project.build("--extend")
    os.utime(last)
    assert "10 images read again; every" in project.build("--check-sources")
    samples = open_cache(project.cache).samples(np.arange(10)).to_pylist()
    for sample, number in zip(samples, [9, 1, 2, 3, 4, 5, 6, 7, 8, 10], strict=True):
        assert int(sample["id"]) == number
        assert sample["content_sha256"] == content_sha256(image_bytes(number))
        assert caption_of(sample["conversations"]) == f"Picture {number}."
    with project.same_in_the_end():
        project.lose("latents/40x32/c/1/0/0/0")
        project.repair("--shards", "1")
