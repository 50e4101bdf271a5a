"""Tables of file names as a source, CSV or JSON Lines: their rows, and errors that name file, row and column."""

import json
import re
from pathlib import Path

import pytest

from cache_store.errors import SourceError
from cache_store.format.plan import caption_of
from precompute.sources.config import FieldNames, SourceConfig
from precompute.sources.images import Source
from precompute.sources.media import IMAGES, VIDEOS, Media
from precompute.sources.opening import open_source
from precompute.sources.place import MISSING
from tests.precompute.conftest import image_bytes, plan_table


def table(folder: Path, text: str | bytes, media: Media = VIDEOS, **fields: object) -> Source:
    path = folder / "list.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_source(SourceConfig(kind="table", path=str(path), fields=FieldNames(**fields)), media)


def rows_of(source: Source) -> list[tuple[str, str, str | None]]:
    rows = plan_table(source.samples()).to_pylist()
    return [(row["id"], row["uri"], caption_of(row["conversations"])) for row in rows]


RECORDS = [
    {"video": "b.mp4", "caption": 'A, "b".\nc'},
    {"video": "a.mp4", "caption": "2"},
    {"video": "in/c d.webm", "caption": None},
]
CSV = 'video,caption\nb.mp4,"A, ""b"".\nc"\na.mp4,2\nin/c d.webm,\n'


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        CSV.rstrip(),
        CSV.replace("\n", "\r\n").replace('".\r\nc', '".\nc'),
        "\ufeff" + CSV,
        "\n".join(map(json.dumps, RECORDS)),
        "\ufeff" + "\r\n\n".join(map(json.dumps, RECORDS)),
    ],
    ids=["CSV", "no last line break", "CRLF", "byte order mark", "JSON Lines", "JSON Lines, CRLF"],
)
def test_rows_keep_their_order_and_texts(tmp_path, text):
    found = rows_of(table(tmp_path, text))
    assert found == [(each["video"], each["video"], each["caption"]) for each in RECORDS]


@pytest.mark.parametrize(
    ("head", "media", "fields"),
    [
        ("file_name,text", VIDEOS, {}),
        ("path,prompt", VIDEOS, {}),
        ("video_path,txt", VIDEOS, {}),
        ("mp4,caption", VIDEOS, {}),
        ("image_path,caption", IMAGES, {}),
        ("jpg,caption", IMAGES, {}),
        ("where,what", VIDEOS, {"image": "where", "caption": "what"}),
    ],
)
def test_usual_columns_are_found_and_others_are_named(tmp_path, head, media, fields):
    assert rows_of(table(tmp_path, f"{head}\na.b,C\n", media, **fields)) == [("a.b", "a.b", "C")]


def test_extra_columns_have_the_types_of_their_values(tmp_path):
    """A number of a CSV is one if it is written as in JSON: 007 is a text."""
    text = "id,video,clip_start,score,code,empty\n1,a.mp4,0,1,007,\n2,a.mp4,2.5,2,08,x\n"
    extra = ["clip_start", "score", "code", "empty"]
    plan = plan_table(table(tmp_path, text, extra=extra).samples())
    assert plan["id"].to_pylist() == ["1", "2"]
    assert plan["clip_start"].to_pylist() == [0.0, 2.5]
    assert plan["score"].to_pylist() == [1, 2]
    assert plan["code"].to_pylist() == ["007", "08"]
    assert plan["empty"].to_pylist() == [None, "x"]


def test_files_lie_beside_the_table_or_elsewhere(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media/a.png").write_bytes(image_bytes(1))
    source = table(tmp_path, "image\nmedia/a.png\ngone.png\n", IMAGES)
    assert [row["fingerprint"] == MISSING for row in plan_table(source.samples()).to_pylist()] == [False, True]
    assert source.read("media/a.png", None) == image_bytes(1)
    config = SourceConfig(kind="table", path=str(tmp_path / "list.txt"), images=str(tmp_path / "media"))
    (tmp_path / "list.txt").write_text("image\na.png\n")
    assert open_source(config, IMAGES).read("a.png", None) == image_bytes(1)


REFUSED: dict[str, tuple[str | bytes, dict[str, object], str]] = {
    "an empty file": ("", {}, r"list.txt is empty; its first line must name the columns"),
    "only a head": ("video,caption\n", {}, r"the source holds no samples"),
    "a column named twice": ("video,video\na,b\n", {}, r"list.txt: the first line must name each column once"),
    "no column of files": ("name,caption\na.mp4,x\n", {}, r"row 0 .*video.*source.fields.image.* name, caption"),
    "a missing name": ("video,caption\na.mp4,x\n,y\n", {}, r"row 1 \(counted from 0\) names no video"),
    "too many values": ("video,caption\na.mp4,x,y\n", {}, r"line 2 has more than 2 values"),
    "an unclosed quote": ('video,caption\na.mp4,"x\n', {}, r"not a CSV in UTF-8: unexpected end"),
    "other bytes": (b"video,caption\na.mp4,\xff\n", {}, r"not a CSV in UTF-8: .*0xff"),
    "a column that is not there": (CSV, {"caption": "text"}, r"row 0 .*has no text, which source.fields names"),
    "a list as caption": ('{"video": "a.mp4", "caption": ["x"]}\n', {}, r"row 0 .*caption is list"),
    "a JSON list": ('[{"video": "a.mp4"}]\n', {}, r"list.txt is a JSON list; write it as JSON Lines"),
    "semicolons": ("video;clip_start\na.mp4;1\n", {}, r"its columns are video;clip_start"),
    "starts that are not named": ("video,clip_start\na.mp4,1\n", {}, r"--source.fields.extra '\[clip_start\]'"),
    "texts as starts": ("video,clip_start\na.mp4,1\nb.mp4,soon\n", {"extra": ["clip_start"]}, r"clip_start"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_table_is_refused_in_one_line(tmp_path, name):
    text, fields, message = REFUSED[name]
    with pytest.raises(SourceError) as raised:
        plan_table(table(tmp_path, text, **fields).samples())
    assert re.search(message, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_lists_videos_or_images_and_counts_the_others(tmp_path):
    """The suffix decides, in upper or lower case; the content does not matter yet."""
    names = ["a.mp4", "B.MOV", "c.webm", "in/d.mkv", "e.avi", "f.m4v", "g.jpg", "h.png", "i.gif", "notes.pdf", "a.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    config = SourceConfig(kind="folder", path=str(tmp_path))
    videos, images = (open_source(config, media).samples() for media in (VIDEOS, IMAGES))
    assert [each["uri"] for each in videos] == ["B.MOV", "a.mp4", "c.webm", "e.avi", "f.m4v", "in/d.mkv"]
    assert [each["uri"] for each in images] == ["g.jpg", "h.png", *(["i.gif"] if IMAGES.includes("i.gif") else [])]
    assert "without a video suffix" in videos.note
    assert ".pdf 1" in videos.note
    assert [*videos.warnings("")] == ["planned without a caption, though others have one: 5 samples"]
    assert images.note.endswith("to encode videos, set clip.frames")
    assert "set clip.frames" not in videos.note
