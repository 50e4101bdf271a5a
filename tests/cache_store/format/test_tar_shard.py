"""A tar shard is what every tar program, numpy and the field's loaders take it for, to the last byte."""

import contextlib
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import webdataset

from cache_store import CacheError, open_cache
from cache_store.verify.verify import verify
from tests.cache_store.conftest import CACHED_ROWS, REJECTED
from tests.cache_store.signing import edited_spec
from tests.make_cache import caption, make_cache

KEYS = [f"{row:012d}" for row in CACHED_ROWS]


@pytest.fixture(params=["float16", "float32"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, latents: np.ndarray) -> Path:
    captions = [caption(f'größer als {row} \U0001f600 \\ "') for row in range(len(latents))]
    options = {"rejected": REJECTED, "dtype": request.param, "store_format": "webdataset"}
    return make_cache(tmp_path / "cache", latents, None, captions, **options)


def tars(cache: Path) -> list[str]:
    return sorted(map(str, (cache / "shards").iterdir()))


def assert_same(found: list[tuple[str, np.ndarray, dict[str, object]]], cache: Path) -> None:
    """Key, latent and JSON of every cached row are those of the cache's own reader."""
    opened = open_cache(cache)
    rows = opened.samples(np.arange(len(opened))).to_pylist()
    texts = [{name: row[name] for name in ("id", "uri", "conversations")} for row in rows]
    keys, latents, contents = zip(*found, strict=True)
    assert [*keys] == KEYS
    assert [*contents] == [{"sha256": row["content_sha256"], **text} for row, text in zip(rows, texts, strict=True)]
    np.testing.assert_array_equal(latents, opened.read(np.arange(len(opened))))


def test_headers_and_members_are_pythons_tarfiles_and_numpys(cache):
    found = []
    for path in tars(cache):
        data = Path(path).read_bytes()
        assert len(data) % tarfile.RECORDSIZE == 0
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                assert data[member.offset : member.offset_data] == member.tobuf(tarfile.USTAR_FORMAT)
                content = data[member.offset_data : member.offset_data + member.size]
                if member.name.endswith(".json"):
                    found[-1] = (*found[-1], json.loads(content))
                else:
                    latent = np.load(io.BytesIO(content), allow_pickle=False)
                    again = io.BytesIO()
                    np.save(again, latent)
                    assert again.getvalue() == content
                    found.append((member.name.removesuffix(".latent.npy"), latent))
    assert_same(found, cache)


def test_gnu_tar_lists_the_members(cache):
    names = [f"{key}.{kind}" for key in KEYS for kind in ("latent.npy", "json")]
    listed = [subprocess.run(["tar", "tf", path], capture_output=True, check=True) for path in tars(cache)]
    assert b"".join(each.stdout for each in listed).decode().split() == names
    assert not any(each.stderr for each in listed)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset 1.0 leaves closing to the collector
def test_webdataset_opens_the_tars(cache):
    samples = webdataset.WebDataset(tars(cache), shardshuffle=False).decode()
    assert_same([(each["__key__"], each["latent.npy"], each["json"]) for each in samples], cache)


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_datasets_open_the_tars(cache, tmp_path, streaming):
    loaded = datasets.load_dataset(
        "webdataset", data_files=tars(cache), split="train", streaming=streaming, cache_dir=str(tmp_path / "hf")
    )
    dtype = open_cache(cache).spec.array.dtype
    assert_same([(each["__key__"], np.array(each["latent.npy"], dtype), each["json"]) for each in loaded], cache)


def test_megatron_energon_prepares_the_tars(cache, tmp_path):
    """In a folder of links, since it writes its index beside the tars."""
    pytest.importorskip("megatron.energon", reason="needs the extra energon, whose pins are others than ours")
    (tmp_path / "energon").mkdir()
    for path in tars(cache):
        (tmp_path / "energon" / Path(path).name).symlink_to(path)
    command = "from megatron.energon.cli.main import main; main()"
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1"]
    arguments = [sys.executable, "-c", command, "prepare", *options, str(tmp_path / "energon")]
    subprocess.run(arguments, capture_output=True, text=True, check=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "energon/.nv-meta/index.sqlite")) as index:
        found = index.execute("SELECT sample_key FROM samples ORDER BY tar_file_id, sample_index").fetchall()
    assert [key for (key,) in found] == KEYS


def test_equal_rows_are_equal_bytes_in_any_batches(tmp_path, latents):
    first, second = (
        make_cache(tmp_path / str(size), latents, batch_size=size, store_format="webdataset") for size in (4, 3)
    )
    assert [Path(path).read_bytes() for path in tars(first)] == [Path(path).read_bytes() for path in tars(second)]


def test_a_shard_without_a_cached_row_is_an_empty_archive(tmp_path, latents):
    path = make_cache(tmp_path / "cache", latents, rejected=range(8, 16), store_format="webdataset")
    with tarfile.open(tars(path)[1]) as archive:
        assert not archive.getnames()
    assert not verify(path, "full").findings
    assert len(open_cache(path).read(np.arange(22))) == 22


def test_every_byte_that_is_no_latents_names_its_row(cache):
    """Headers, JSON and padding; and those after the last row the file alone."""
    path = cache / "shards/000002.tar"
    sound = path.read_bytes()
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    starts = [member.offset for member in members if member.name.endswith(".npy")]
    end = members[-1].offset_data + 512
    for position in range(0, len(sound), 97):
        data = bytearray(sound)
        data[position] ^= 8
        path.write_bytes(data)
        row = 15 + sum(start <= position for start in starts) if position < end else None
        places = {(finding.shard, finding.row) for finding in verify(cache, "full").findings}
        assert places == {(2, None), (2, row)}, position


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("codec", "zstd")])
def test_a_spec_of_a_tar_that_cannot_be_is_refused(cache, field, value):
    with edited_spec(cache) as spec:
        spec["array"][field] = value
    with pytest.raises(CacheError, match=f"holds no valid spec: tars hold .*{value}"):
        open_cache(cache)
