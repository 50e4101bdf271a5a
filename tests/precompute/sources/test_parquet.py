"""Parquet files of images as a source, written by Hugging Face datasets and by Arrow."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.config import SourceConfig
from precompute.sources.fields import conversation_of
from precompute.sources.opening import open_source
from precompute.sources.place import MISSING
from tests.hub import DATA_SET, running_hub
from tests.precompute.sources.pictures import opened, rows_of, write_dataset


def write_table(path: Path, group: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize("large", [False, True])
def test_columns_are_found_by_usual_names_or_by_those_given(tmp_path, large):
    """Conversations win over captions; ids default to file and row; both widths of Arrow's text and bytes are read.

    A caption is read as it is; without one there is no conversation.
    """
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


def test_a_file_that_changes_meanwhile_stops_the_build(tmp_path):
    path = write_table(tmp_path / "a.parquet", image=[b"a"])
    source = opened("parquet", path)
    path.unlink()
    write_table(path, image=[b"a", b"b"])
    with pytest.raises(SourceError, match=r"a.parquet was changed while it was read"):
        source.read("a.parquet/0")


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


READ_ALL = """
import os, resource, sys
from cache_store.errors import SourceError
from precompute.sources import parquet
from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source
parquet.MAX_GROUP_BYTES["images"] = 2**27
source = open_source(SourceConfig(kind="parquet", path=sys.argv[1]))
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 2**31,) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
end = "read"
try:
    for row in source.samples():
        source.read(row["uri"])
except SourceError as error:
    end = error
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 2**10, end)
"""


def read_apart(path: Path) -> tuple[int, str]:
    """Read all images in a process with 2 GiB more; return its growth in MiB, and the error."""
    command = [sys.executable, "-c", READ_ALL, str(path)]
    growth, end = subprocess.check_output(command, text=True, timeout=300).strip().split(maxsplit=1)
    return int(growth), end


@pytest.mark.slow
def test_one_value_in_many_rows_is_refused_once_it_takes_too_much(tmp_path):
    """The file of less than a kilobyte unpacks to 4 GB; it takes some rows' memory, and that of the images before."""
    value, rows = bytes(215_000), 20_000
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": repeated}), path, row_group_size=rows, store_schema=False, compression="zstd")
    assert path.stat().st_size < 1_000
    growth, end = read_apart(path)
    assert end.startswith(f"{path}: row group 0 is too large, with more than {2**27:,} bytes of images; write the file")
    assert growth < 256


def test_a_row_group_that_claims_too_much_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("precompute.sources.parquet.MAX_GROUP_BYTES", {"images": 1_000, "texts": 1_000})
    source = opened("parquet", write_table(tmp_path / "a.parquet", image=[b"a" * 600, b"b" * 600]))
    with pytest.raises(SourceError, match="row group 0 is too large, with more than 1,000 bytes of images"):
        source.read("a.parquet/0")


# On the Hub.

READ_FROM_THE_HUB = """
import hashlib, sys
from cache_store.program.running import run_program
from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source

def run(words):
    source = open_source(SourceConfig(kind="parquet", path=words[0]))
    for sample in source.samples():
        print(sample["uri"], hashlib.sha256(source.read(sample["uri"])).hexdigest(), sample["fingerprint"])
    return 0

sys.exit(run_program("precompute", run, None))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    for place, numbers in enumerate(((9, 1, 2), (3, 4, 5, 6, 7))):
        write_dataset(root / f"data/train-{place}.parquet", *numbers)
    with running_hub(root) as endpoint:
        yield endpoint, root


def read_from_the_hub(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ_FROM_THE_HUB, url]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_tables_on_the_hub_are_those_on_disk(hub):
    (endpoint, root), path = hub, "data/train-*.parquet"
    done = read_from_the_hub(f"{DATA_SET}/{path}", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    source = open_source(SourceConfig(kind="parquet", path=str(root / path)))
    uris = [str(sample["uri"]) for sample in source.samples()]
    here = [(uri, hashlib.sha256(source.read(uri)).hexdigest()) for uri in uris]
    assert [tuple(line.split()[:2]) for line in done.stdout.splitlines()] == here, done.stderr
    sha1 = hashlib.sha1((root / "data/train-0.parquet").read_bytes()).hexdigest()
    assert done.stdout.splitlines()[0].endswith(f":{sha1}")
