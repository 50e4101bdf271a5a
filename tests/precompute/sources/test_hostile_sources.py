"""Sample lists, captions and model files that are not what they should be: one line that names the place, exit 1."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.metadata import read_spec
from cache_store.cache.reader import open_cache
from cache_store.errors import CacheError, ModelError, SourceError
from cache_store.format.formats import shard_format
from cache_store.format.schema import StoreFormat, samples_file
from cache_store.format.tar import npy_header
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.plan import make_plan
from precompute.sources import SourceConfig, open_source
from tests.make_cache import make_cache
from tests.precompute.conftest import image_bytes
from tests.precompute.sources.test_sources import record, write_chat, write_tree

A = json.dumps(record("a"))

REFUSED: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "truncated"),
    "an empty list": (b"[]", "no samples"),
    "no list": (b'{"a": 1}', "Expected `array`, got `object`"),
    "a list of lists": (b"[[]]", "record 0 .*Expected `object`"),
    "a missing field": (f'[{A}, {{"id": "b"}}]'.encode(), "record 1 .*`conversations`"),
    "a missing id": (f'[{A}, {A}, {{"conversations": []}}]'.encode(), "record 2 .*`id`"),
    "a null id": (f"[{A.replace(chr(34) + 'a' + chr(34), 'null')}]".encode(), "record 0 .*id"),
    "an image that is a number": (f'[{A[:-1]}, "image": 7}}]'.encode(), "record 0 .*image"),
    "a turn without a value": (b'[{"id": 1, "conversations": [{"from": "human"}]}]', "record 0 .*value"),
    "a turn that is a number": (b'[{"id": 1, "conversations": [3]}]', "record 0 .*conversations"),
    "a number without a value": (b'[{"id": NaN, "conversations": []}]', "malformed"),
    "a number without a bound": (b'[{"id": Infinity, "conversations": []}]', "malformed"),
    "a number of 5,000 digits": (b'[{"id": %s, "conversations": []}]' % (b"9" * 5_000), "record 0 .*out of range"),
    "an id that is a fraction": (b'[{"id": 1.5, "conversations": []}]', "record 0 .*id"),
    "half a character": (b'[{"id": "\\ud800", "conversations": []}]', "malformed.*surrogate"),
    "bytes that begin no list": (b'[{"id": "\xff"', "chat.json"),
    "bytes that are no text": (f"[{A}, ".encode() + b'{"id": "\xff\xfe"}]', r"byte \d+ is not UTF-8"),
    "text of two bytes a character": (f"[{A}]".encode("utf-16"), "malformed"),
    "a list that is cut": (f"[{A}, {A[:30]}".encode(), "truncated"),
    "something behind the list": (f"[{A}] [{A}]".encode(), "trailing"),
    "a million brackets": (b'[{"id": 1, "x": ' + b"[" * 10**6, "nested too deeply"),
    "brackets in a turn": (b'[{"id": 1, "conversations": [{"x": ' + b'{"y":' * 10**5, "nested too deeply"),
    "a conversation that is text": (f'[{A[:-1]}, "conversations": "hello"}}]'.encode(), "record 0 .*conversations"),
    "two ids twice": (json.dumps([record(name) for name in "abcab"]).encode(), "2 occur more than once: a, b$"),
    "an id twice": (f"[{A}, {A}]".encode(), "unique; 1 occur more than once: a$"),
    "an id that a terminal would obey": (
        json.dumps([record("a\nb\x1b[2J")] * 2).encode(),
        r"more than once: 'a\\nb\\x1b\[2J'$",
    ),
    "an id as a number and as text": (
        b'[{"id": 1, "conversations": []}, {"id": "1", "conversations": []}]',
        "unique; 1 occur more than once: 1$",
    ),
    "a pickle": (pickle.dumps([{"id": "a"}]), "malformed"),
}
"""Bytes of a chat.json, and what is said of them."""


def plan_of(config: SourceConfig) -> pa.Table:
    return make_plan(open_source(config).samples())


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_that_is_no_list_is_refused_in_one_line(tmp_path, name):
    data, message = REFUSED[name]
    with pytest.raises(SourceError, match=message) as caught:
        plan_of(write_chat(tmp_path, data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_list_without_an_end_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "chat.json")
    with pytest.raises(SourceError, match=r"source\.path: .*chat\.json is no file"):
        plan_of(SourceConfig(kind="llava", path=str(tmp_path / "chat.json")))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_odd_but_lawful_lists_are_read(tmp_path, mark):
    """A byte order mark, unknown fields, names that cannot exist, a megabyte of text, a field that comes twice."""
    records = [
        {**record("long"), "conversations": [{"from": "gpt", "value": "x" * 10**6}]},
        {**record("nul\0"), "image": "nul\0.jpg", "more": {"deep": [1, None, {}]}},
        {**record("path"), "image": "../" * 5 + "etc/passwd"},
        {**record("name"), "image": "x" * 10**5},
    ]
    text = json.dumps(records)[:-1] + ', {"id": "first", "id": "last", "conversations": []}]'
    plan = plan_of(write_chat(tmp_path, mark + text.encode()))
    assert plan["id"].to_pylist() == ["last", "long", "name", "nul\0", "path"]
    assert set(plan["fingerprint"].to_pylist()) == {"missing"}


SPOILT = [
    *(("chat.json", REFUSED[name][0]) for name in ("a missing field", "a million brackets", "a pickle")),
    ("chat.json", REFUSED["bytes that are no text"][0]),
    *(("images.zip", data) for data in (b"PK", bytes(257) + b"ustar" + bytes(300), b"\x1f\x8b\x08")),
]


@pytest.mark.parametrize(("file", "data"), SPOILT, ids=lambda value: str(value[:12]))
def test_the_program_says_it_in_one_line_and_exits_with_1(project, file, data):
    (project.source / file).write_bytes(data)
    (line,) = project.build(code=1).splitlines()
    assert line.startswith("precompute: error: ")
    assert f"{project.source}/{file}" in line
    assert not (project.cache / "zarr.json").exists()


def test_a_caption_that_is_not_utf8_is_named(tmp_path):
    with pytest.raises(SourceError, match="caption a.txt cannot be read as UTF-8 text"):
        plan_of(write_tree(tmp_path, {"a.jpg": b"x", "a.txt": b"caf\xe9"}))


def test_hostile_images_are_rejected_each_for_itself(project):
    """From a tar: a link, a bomb, a name twice, a pipe; the sound ones are cached as if they were alone."""
    others = {"notes.[b]": b"no image", "notes.md": b"no image"}
    hostile = {"4.png": b"\x89PNG\r\n\x1a\n", "5.jpg": pickle.dumps("image"), "6.gif": b"GIF89a"}
    sound = {f"{number}.png": image_bytes(number) for number in range(4)}
    images = project.folder / "images"
    write_tree(images, {**others, **hostile, **sound})
    (images / "7.jpg").symlink_to("/etc/passwd")
    archive = shutil.make_archive(str(project.folder / "hostile"), "tar", images)
    config = project.config(source={"kind": "folder", "path": archive}, run__max_reject_fraction=0.5)
    before = {*project.folder.rglob("*")}
    said = project.run(main, "build", "--config", config)
    cache = open_cache(project.cache)
    assert cache.samples(np.arange(4))["id"].to_pylist() == list(sound)
    assert cache.seal.reasons == {"cannot decode": 3, "damaged archive member": 1}
    told = "passed over: 2 files that are no images by their names (.md 1, 1 of other suffixes)"
    assert f"precompute: {told}\n" in said
    assert f"\n{told}\n" in said
    assert all(path.is_relative_to(project.cache) for path in {*project.folder.rglob("*")} - before)


class CreatesFile:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


@pytest.fixture
def trap(tmp_path) -> Path:
    return tmp_path / "a pickle was loaded"


def test_the_trap_works(trap):
    os.close(pickle.loads(pickle.dumps(CreatesFile(trap))))  # noqa: S301 (to know that the tests below mean something)
    assert trap.exists()


def small_latents(side: int = 2) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, 4, side, side)).astype(np.float32)


def read_everything(path: Path) -> None:
    cache = open_cache(path)
    cache.samples(np.arange(len(cache)))
    cache.read(np.arange(len(cache)))


SHARD_FILES = {"zarr": "latents/c/0/0/0/0", "webdataset": "shards/000000.tar"}


@pytest.mark.parametrize("store_format", SHARD_FILES)
@pytest.mark.parametrize("file", ["shard", "samples/000000.parquet", "plan.parquet", "seal.json", "zarr.json"])
def test_a_pickle_in_place_of_a_caches_file_is_never_loaded(tmp_path, trap, store_format, file):
    path = make_cache(tmp_path / "cache", small_latents(), store_format=store_format)
    file = SHARD_FILES[store_format] if file == "shard" else file
    (path / file).write_bytes(pickle.dumps(CreatesFile(trap)))
    assert any(finding.file == file for finding in verify(path, "full").findings)
    if file != "plan.parquet":  # which readers do not read
        with pytest.raises(CacheError):
            read_everything(path)
    assert not trap.exists()


@pytest.mark.parametrize("store_format", get_args(StoreFormat))
def test_a_pickle_in_place_of_a_latent_is_bytes_like_any_other(tmp_path, trap, store_format):
    """Also where checksums are not asked for, and where the tar says that a pickled object is what it holds."""
    path = make_cache(tmp_path / "cache", small_latents(16), store_format=store_format)
    shard = shard_format(read_spec(path)).shard_file(0)
    (place,) = pq.read_table(path / samples_file(0)).slice(0, 1).to_pylist()
    data = bytearray((path / shard).read_bytes())
    latent = slice(place["offset"], place["offset"] + place["length"])
    data[latent] = pickle.dumps(CreatesFile(trap)).ljust(place["length"], b"\0")
    if store_format == "webdataset":
        header = npy_header("float16", (4, 16, 16))
        assert data[latent.start - len(header) : latent.start] == header
        data[latent.start - len(header) : latent.start] = header.replace(b"'<f2'", b"'|O' ")
    (path / shard).write_bytes(data)
    assert open_cache(path).read(np.arange(8), check=False)[0].tobytes() == data[latent]
    with pytest.raises(CacheError, match=r"row 0 in shard 0 .*does not match its crc32c"):
        read_everything(path)
    assert (shard, 0) in {(finding.file, finding.row) for finding in verify(path, "full").findings}
    assert not trap.exists()


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", "model.pt"])
def test_a_pickle_in_place_of_weights_is_never_loaded(tmp_path, vae_path, trap, name):
    model = tmp_path / "model"
    shutil.copytree(vae_path, model)
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (model / "vae" / name).write_bytes(pickle.dumps(CreatesFile(trap)))
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_encoder(EncoderConfig(model=str(model), device="cpu"), "signed")
    assert "\n" not in str(caught.value)
    assert not trap.exists()
