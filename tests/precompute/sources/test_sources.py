import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import ConfigError, MissingPathError, SourceError
from precompute.images.rejected import Rejected
from precompute.plan import compare_plans, make_plan
from precompute.sources import SourceConfig, open_source
from precompute.sources.image_store import MISSING, ImageFolder, open_image_store
from precompute.sources.listing import count_suffixes
from tests.make_cache import make_cache


def record(name: str, **more: object) -> dict[str, object]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"A {name}."}]
    return {"id": name, "image": f"{name}.jpg", "conversations": turns, **more}


def write_chat(folder: Path, records: object) -> SourceConfig:
    """A list of records, or the bytes of a file in their place."""
    path = folder / "chat.json"
    path.write_bytes(records if isinstance(records, bytes) else json.dumps(records).encode())
    return SourceConfig(kind="llava", path=str(path))


def write_tree(folder: Path, files: dict[str, bytes], form: str = "folder") -> SourceConfig:
    """A folder, or an archive of it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    path = folder if form == "folder" else shutil.make_archive(str(folder), form, folder)
    return SourceConfig(kind="folder", path=str(path))


def plan_rows(config: SourceConfig) -> list[dict[str, object]]:
    return make_plan(open_source(config).samples()).to_pylist()


def test_llava_records_become_rows_sorted_by_id(tmp_path):
    records = [record("b"), record("a", extra=1), {**record("c"), "id": 7}]
    rows = plan_rows(write_chat(tmp_path, records))
    assert [(row["row"], row["id"], row["uri"]) for row in rows] == [
        (0, "7", "c.jpg"),
        (1, "a", "a.jpg"),
        (2, "b", "b.jpg"),
    ]
    assert rows[1]["conversations"] == record("a")["conversations"]
    assert rows == plan_rows(write_chat(tmp_path, records[::-1]))


def test_a_record_without_an_image_is_rejected_when_read(tmp_path):
    config = write_chat(tmp_path, [{"id": "text only", "conversations": []}])
    assert plan_rows(config)[0]["uri"] == ""
    with pytest.raises(Rejected, match="missing: the record names no image"):
        open_source(config).read("")


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_a_folder_gives_its_images_with_captions_beside_them(tmp_path, form):
    files = {"b.jpg": b"x", "deep/a.PNG": b"pixels", "notes.md": b"x", "deep/a.txt": b" a cat \n"}
    config = write_tree(tmp_path / "tree", files, form)
    rows = plan_rows(config)
    assert [row["id"] for row in rows] == ["b.jpg", "deep/a.PNG"]
    assert rows[0]["conversations"] == []
    assert rows[1]["conversations"] == [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a cat"}]
    assert open_source(config).read("deep/a.PNG") == b"pixels"


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (b"\xef\xbb\xbfA cat.", ["<image>", "A cat."]),
        (b"A\n cat", ["<image>", "A\n cat"]),
        *((nothing, []) for nothing in (b"", b" \n", b"\xef\xbb\xbf\r\n")),
    ],
)
def test_a_captions_byte_order_mark_is_no_text(tmp_path, data, values):
    (row,) = plan_rows(write_tree(tmp_path, {"a.jpg": b"x", "a.txt": data}))
    assert [turn["value"] for turn in row["conversations"]] == values


MAC_FOLDER = {
    "photos/a.jpg": b"pixels",
    "photos/a.txt": b"a cat",
    "photos/deep/b.jpg": b"more",
    **dict.fromkeys((".DS_Store", "photos/.DS_Store"), b"Bud1"),
    **dict.fromkeys(("photos/._a.jpg", "__MACOSX/._photos", "__MACOSX/photos/._a.jpg"), b"\0\5\x16\7"),
    "__MACOSX/photos/deep/b.jpg": b"\0\5\x16\7",
}


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_what_a_mac_adds_to_a_folder_or_an_archive_is_no_sample(tmp_path, form):
    """So the one top folder of an archive may be left out."""
    config = write_tree(tmp_path / "mac", MAC_FOLDER, form)
    assert [row["id"] for row in plan_rows(config)] == ["photos/a.jpg", "photos/deep/b.jpg"]
    if form != "folder":
        images = open_image_store(Path(config.path))
        assert images.read("a.jpg") == images.read("photos/a.jpg") == b"pixels"
        assert images.fingerprint("deep/b.jpg") == images.fingerprint("photos/deep/b.jpg") != MISSING


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "", "nul\0l"])
def test_names_never_leave_the_image_folder(tmp_path, name):
    (tmp_path / "images").mkdir()
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(Rejected, match="missing"):
        ImageFolder(tmp_path / "images").read(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SourceConfig(kind="llava", path="/nowhere/chat.json"), "source.path: /nowhere/chat.json does not exist"),
        (SourceConfig(kind="folder", path="/nowhere"), "source.path: /nowhere does not exist"),
        (SourceConfig(kind="llava", path=__file__, images="/nowhere"), "source.images: /nowhere does not exist"),
    ],
)
def test_a_path_at_which_there_is_nothing_is_wrong_usage(config, message):
    with pytest.raises(MissingPathError, match=message) as caught:
        open_source(config)
    assert caught.value.exit_code == 2


def test_differences_between_sample_lists_are_named_by_id(tmp_path):
    before = make_plan(open_source(write_chat(tmp_path, [record(name) for name in "abc"])).samples())
    changed = [record("a"), {**record("b"), "conversations": []}, record("d")]
    now = make_plan(open_source(write_chat(tmp_path, changed)).samples())
    assert str(compare_plans(before, now)) == "1 new (d); 1 gone (c); 1 with another image name or text (b)"


MIXED = {
    **dict.fromkeys(("a.jpg", "deep/b.PNG", "a.txt", ".DS_Store", "._a.jpg"), b"x"),
    **dict.fromkeys(("notes.txt", "c.HEIC", "README", "odd.s%x", "long.abcdefghijklmnop"), b"x"),
    **{f"{number}.{suffix}": b"x" for number in range(2) for suffix in ("eps", "svg", "psd", "ico")},
}
"""Two images, a caption, macOS metadata and 13 other files."""

MIXED_TOLD = (
    "passed over: 13 files that are no images by their names (.eps 2, .ico 2, .psd 2, .svg 2, .heic 1, "
    "1 without a suffix, 3 of other suffixes)"
)


def passed_over(config: SourceConfig) -> str:
    return open_source(config).samples().passed_over


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_files_that_are_no_samples_are_counted_by_suffix(tmp_path, form):
    config = write_tree(tmp_path / "mixed", MIXED, form)
    assert [row["id"] for row in plan_rows(config)] == ["a.jpg", "deep/b.PNG"]
    assert passed_over(config).startswith(MIXED_TOLD)
    assert passed_over(config).endswith("; convert HEIC to JPEG or PNG, as with the package pillow-heif")


def test_nothing_is_said_where_nothing_is_passed_over(tmp_path):
    """Of what lies beside a chat.json, the list alone decides."""
    assert passed_over(write_tree(tmp_path, {"a.jpg": b"x", "a.txt": b"a cat", ".DS_Store": b"x"})) == ""
    write_tree(tmp_path, MIXED)
    assert passed_over(write_chat(tmp_path, [record("a")])) == ""


def test_suffixes_beyond_a_thousand_are_counted_together():
    counts = count_suffixes(f"a.{number}" for number in range(5_000))
    assert (counts[".7"], counts["of other suffixes"], counts.total()) == (1, 4_000, 5_000)


def test_a_linked_folder_is_passed_over_and_named(tmp_path):
    config = write_tree(tmp_path / "images", {"a.jpg": b"x", "elsewhere/b.jpg": b"x"})
    (tmp_path / "images" / "deep\n").symlink_to("elsewhere")
    assert passed_over(config) == r"passed over: 1 linked folder (deep\n)"
    (tmp_path / "images" / "again").symlink_to("elsewhere")
    assert passed_over(config) == "passed over: 2 linked folders (first: again)"


@pytest.mark.parametrize("form", ["folder", "tar"])
@pytest.mark.parametrize("name", [b"caf\xe9.jpg", b"caf\xe9/a.jpg"])
def test_a_file_whose_name_is_not_utf8_is_passed_over_and_named(tmp_path, form, name):
    config = write_tree(tmp_path / "images", {"a.jpg": b"x", os.fsdecode(name): b"x"}, form)
    assert [row["id"] for row in plan_rows(config)] == ["a.jpg"]
    assert passed_over(config) == f"passed over: 1 file whose name is not UTF-8 ({name!r})"


def test_an_empty_source_says_what_it_holds_instead(tmp_path):
    config = write_tree(tmp_path / "images", {"a.heic": b"x", "b.txt": b"x"})
    (tmp_path / "images" / "photos").symlink_to(tmp_path)
    with pytest.raises(SourceError) as caught:
        plan_rows(config)
    assert str(caught.value) == (
        "the source holds no samples; passed over: 2 files that are no images by their names (.heic 1, .txt 1); "
        "1 linked folder (photos); convert HEIC to JPEG or PNG, as with the package pillow-heif"
    )


def test_the_files_of_a_cache_are_no_samples(tmp_path):
    config = write_tree(tmp_path / "images", {"a.jpg": b"x"})
    make_cache(tmp_path / "images" / "deep" / "cache", np.zeros((2, 1, 2, 2), np.float32))
    (tmp_path / "images" / "deep" / "cache" / "sheets").mkdir()
    (tmp_path / "images" / "deep" / "cache" / "sheets" / "unusual.png").write_bytes(b"x")
    assert [row["id"] for row in plan_rows(config)] == ["a.jpg"]
    assert passed_over(config) == "passed over: 1 folder that is a cache (deep/cache)"


def test_images_are_named_for_llava_alone():
    with pytest.raises(ConfigError, match="source.images is for kind llava"):
        SourceConfig(kind="folder", path=".", images=".")
