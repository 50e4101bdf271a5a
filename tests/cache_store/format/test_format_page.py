"""docs/format.md is the specification: its reader reads both formats and finds damage, its tables name every field, and
its rules hold, checked without this project's code. Small caches of each kind are committed:
today's code must read them and write equal bytes. Once version 1 is released, a changed format is another
FORMAT_VERSION, with golden caches beside these. Until then, write these again with
`python -m tests.cache_store.format.test_format_page`.
"""

import base64
import hashlib
import json
import math
import re
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import rfc8785
import zarr

from cache_store import open_cache
from cache_store.cache.metadata import write_build
from cache_store.copy.withdraw import withdraw
from cache_store.format.array import ArraySpec, EncoderIdentity
from cache_store.format.codec import crc32c, zarr_codecs
from cache_store.format.record import Record
from cache_store.format.roll import ENTRY
from cache_store.format.schema import CommitRun, Spec, StoreFormat
from cache_store.format.tables import PLAN_SCHEMA, SAMPLES_SCHEMA, SCALE_COLUMNS, TEXTS_SCHEMA
from cache_store.verify.verify import verify
from tests.cache_store.conftest import SHAPES, contents, samples_of, shard_name, swap
from tests.make_cache import caption, make_cache, text_recipe

PAGE = (Path(__file__).parents[3] / "docs/format.md").read_text()
HERE = Path(__file__).parent
IMAGE, WIDE = (2, 2, 3), (2, 4, 1)
GOLDEN: dict[str, dict[str, Any]] = {
    "images": {"shapes": [IMAGE]},
    "images_tars": {"shapes": [IMAGE], "store_format": "webdataset"},
    "sizes": {"shapes": [IMAGE, WIDE]},
    "sizes_tars": {"shapes": [IMAGE, WIDE], "store_format": "webdataset"},
    "uint8": {"shapes": [IMAGE], "dtype": "uint8"},
    "parts": {"shapes": [IMAGE, WIDE], "parts": [1, 3]},
    "withdrawn": {"shapes": [IMAGE], "gone": ["sample-000001", "sample-000005"]},
    "clips": {"shapes": [(2, 2, 2, 3), (2, 3, 2, 3)], "clips": True},
    "text": {"shapes": [(4, 3)], "text": text_recipe(4)},
    "pooled": {"shapes": [(3,)], "text": text_recipe(4)},
    "tower": {"shapes": [(4, 3)], "store_format": "webdataset"},
}
"""The committed caches: the shapes of their samples, six of each, and what else `make_cache` is told."""
IDENTITIES: dict[str, str] = {
    "images": "aada330fa7b9297cd3682d8b93871c443b87162bb5dbc3d0aed25960616873bc",
    "images_tars": "c33ac2183e58628b83c1fd85e36103a5d3b20cf85505d7610cfd8670aaa83074",
    "sizes": "263f918b2f8731827137c62b4cceb78469e9f0050a8ab63e5b47fcb276430899",
    "sizes_tars": "bff5d24f4692c3bddc94a854551ceb969b8a947a8bd650ff3b58643449cf9825",
    "uint8": "d90bb03c64de3fe50ae169af6ba2a7d71c18d2e518e625c1eecbb74e32609d0d",
    "parts": "985c31ee0840a169906280218206c419de438044e86216ceee4505de9dddbfa9",
    "withdrawn": "337e2bd7aa8f08d6f5baf138280b0a6bb49204503962de9cc57191f5daa41a74",
    "clips": "2a4fbaab53b44d382b38d3407e3896ee9758a952f5ef0a9fa7ca970736c19e39",
    "text": "eb6c7988cd62fb03cbc51ea559276ab79538962082388b23f698dbdd2d062723",
    "pooled": "82d5053674c79ab00792d4fcbfb64854205f0939456c88161ca584da9af7a005",
    "tower": "ac7de8e2b17c33d2a43fc2ab08a81ddee9ce15bd96ba42014ea6e3f8013eb54c",
}
ROWS, REJECTED, SAMPLES_PER_SHARD = 10, (2, 9), 4
CACHED = [row for row in range(ROWS) if row not in REJECTED]


def records_below(base: type[Record]) -> Iterator[type[Record]]:
    for record in base.__subclasses__():
        yield record
        yield from records_below(record)


RECORDS = {record for record in records_below(Record) if record.__module__.startswith("cache_store.format.")}


def page_code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def read_row() -> Callable[..., np.ndarray | None]:
    """The page's reader, copied as a stranger would copy it."""
    (code,) = page_code("python")
    names: dict[str, Any] = {}
    exec(code, names)
    return names["read_row"]


@pytest.fixture
def cache(store_format: StoreFormat, tmp_path: Path) -> Path:
    """Write the committed cache of one size again with today's code: rows [0, 4) and [4, 6), row 2 rejected."""
    return write_golden(tmp_path / "cache", [IMAGE], store_format=store_format)


def load(path: Path) -> Any:
    return json.loads(path.read_text(), parse_int=float)


# The page's reader.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_pages_reader_reads_samples_of_any_axes(tmp_path, store_format, shape, read_row):
    samples = samples_of(shape, ROWS)
    path = make_cache(tmp_path / "cache", samples, rejected=REJECTED, store_format=store_format)
    assert [row for row in range(ROWS) if read_row(path, row) is None] == [*REJECTED]
    found = np.stack([read_row(path, row) for row in CACHED])
    np.testing.assert_array_equal(found, samples[CACHED].astype(np.float16), strict=True)


def test_the_pages_reader_finds_any_damage(cache, read_row):
    """Random bits of the shard, the seal and the record's content; another shard's file; a missing seal."""
    random = np.random.default_rng(0)
    shard, commit, seal = cache / shard_name(cache, 1), cache / "commits/000001.json", cache / "seal.json"
    content_end = commit.read_bytes().rindex(b',"format_version"')
    for path, start, end in ((shard, 0, None), (seal, 0, None), (commit, len('{"content":'), content_end)):
        good = path.read_bytes()
        for position in random.integers(start, end or len(good), 160):
            data = bytearray(good)
            data[position] ^= 1 << random.integers(8)
            path.write_bytes(data)
            with pytest.raises(AssertionError, match="damaged"):
                read_row(cache, 4)
        path.write_bytes(good)
    assert read_row(cache, 4) is not None
    swap(cache / shard_name(cache, 0), shard)  # every CRC32C of a Zarr shard is right there
    for row in (0, 2, 4):
        with pytest.raises(AssertionError, match="is damaged"):
            read_row(cache, row)
    seal.unlink()
    with pytest.raises(FileNotFoundError, match=r"seal\.json"):
        read_row(cache, 0)


def test_the_pages_reader_is_short_and_needs_numpy_alone():
    (code,) = page_code("python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imported == {"hashlib", "io", "json", "tarfile", "pathlib", "numpy"}


# The page's tables and examples.


def test_the_page_names_every_field_of_every_record_and_table():
    words = set(re.findall(r"`\W*(\w+)`", PAGE))
    assert {Spec, CommitRun, ArraySpec, EncoderIdentity} < RECORDS
    fields = {name for record in RECORDS for name in record.__struct_fields__}
    missing = (fields | {*PLAN_SCHEMA.names, *TEXTS_SCHEMA.names, *SAMPLES_SCHEMA.names, *SCALE_COLUMNS}) - words
    assert not missing, sorted(missing)


def test_an_arrays_metadata_is_what_the_page_shows():
    metadata, blosc = map(json.loads, page_code("json"))
    assert metadata == load(HERE / "golden_images" / "latents/24x16/zarr.json")
    assert blosc in zarr_codecs("zstd", 2)
    group = load(HERE / "golden_images" / "zarr.json")
    latents = {"attributes": {}, "node_type": "group", "zarr_format": 3}
    arrays = {"latents": latents, "latents/24x16": metadata}
    inline = {"kind": "inline", "must_understand": False, "metadata": arrays}
    group["attributes"].pop("encode_once")
    assert group == {"attributes": {}, "consolidated_metadata": inline, "node_type": "group", "zarr_format": 3}


# The page's rules.


def digest(record: Any) -> str:
    return hashlib.sha256(rfc8785.dumps(record)).hexdigest()


def proof_of(data: bytes, size: int, store_format: StoreFormat) -> int:
    """Return the proof of a shard of `SAMPLES_PER_SHARD` rows of this size, whose first row is cached."""
    if store_format == "webdataset":
        return crc32c(data[: 512 + 128 + size])
    return crc32c(data[-16 * SAMPLES_PER_SHARD - 4 : -4] + data[:size])


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of_lines(rows: list[dict[str, Any]], *names: str) -> str:
    lines = ([row[name] for name in names] for row in rows)
    return hashlib.sha256(b"".join(rfc8785.dumps(line) + b"\n" for line in lines)).hexdigest()


def test_every_digest_of_a_cache_follows_from_the_pages_rules(tmp_path, store_format):
    """The values cover every form of a float; ids and captions cover every form of text."""
    scales = np.array([1e-21, 3e-5, 1e-4, 1.0, 1e5, 1e12, 1e18], np.float32)
    latents = np.random.default_rng(1).standard_normal((ROWS, 7, 3, 5), np.float32) * scales[:, None, None]
    latents[:, 3] = np.round(latents[:, 3])
    names = [f'é \u2028 \x7f\x01\x1f \\ "{row}" \U0001f600\n' for row in range(ROWS)]
    means = [1e-5, 9.99e-6, -0.0, 1e15, 1e16, -2.5e-300, 1.7976931348623157e308]
    settings = {"rejected": REJECTED, "samples_per_shard": SAMPLES_PER_SHARD, "store_format": store_format}
    texts = [caption(f"a {name}/") for name in names]
    path = make_cache(tmp_path / "cache", latents, names, texts, dtype="float32", latents_mean=means, **settings)
    write_build(path, {"empty": {}, "none": [], "text": names, "floats": [1e-7, 0.0001, 9999999999999998.0], "int": -3})

    records = {file.relative_to(path).as_posix(): load(file) for file in path.rglob("*.json")}
    for name, record in records.items():
        assert rfc8785.dumps(record) == (path / name).read_bytes(), name
    signed = [record for record in records.values() if "sha256" in record]
    assert len(signed) == 3 + 3
    assert all(digest({**record, "sha256": ""}) == record["sha256"] for record in signed)
    spec, seal = records["zarr.json"]["attributes"]["encode_once"], records["seal.json"]
    contents = [records[f"commits/{shard:06d}.json"]["content"] for shard in range(3)]
    assert spec == seal["spec"]
    recipe = {name: value for name, value in spec.items() if name not in ("shards", "parts", "arrays")}
    assert [recipe] * 3 == [each["recipe"] for each in contents]
    roll = (path / "shards.bin").read_bytes()
    assert [digest(content) for content in contents] == [roll[first + 32 : first + 64].hex() for first in (0, 64, 128)]
    entries = [struct.unpack("<6IQ", roll[first : first + 32]) for first in (0, 64, 128)]
    facts = [(each["cached"], 0, each["proof"], each["files"][0]["bytes"]) for each in contents]
    assert [(0, 0, rows, *each) for rows, each in zip((4, 4, 2), facts, strict=True)] == entries
    assert len(roll) == 3 * ENTRY.itemsize
    shards = [(path / each["files"][0]["path"]).read_bytes() for each in contents]
    assert [proof_of(data, latents[0].nbytes, store_format) for data in shards] == [each["proof"] for each in contents]
    assert digest_of(roll) == seal["shards_file"]["sha256"] == open_cache(path).seal.identity

    (part,), (in_force,) = spec["parts"], records["texts.json"]["parts"]
    plan = pq.read_table(path / "plan/000000.parquet").to_pylist()
    assert (part["rows"], part["shards"], part["digest"]) == (ROWS, 3, digest_of_lines(plan, "id", "uri"))
    assert digest_of_lines(plan[4:8], "id", "uri") == contents[1]["samples"]
    footer = pq.read_metadata(path / "plan/000000.parquet").metadata[b"encode_once.digests"]
    assert base64.b64decode(footer).hex() == part["digest"] + "".join(each["samples"] for each in contents)
    texts = pq.read_table(path / f"texts/000000-{in_force['digest'][:16]}.parquet").to_pylist()
    lines = [{**row, **text} for row, text in zip(plan, texts, strict=True)]
    assert digest_of_lines(lines, "id", "conversations") == in_force["digest"]
    samples = pq.read_table(path / "samples/000001.parquet").to_pylist()
    assert digest_of_lines(samples, "row", "id", "content_sha256") == contents[1]["rows_digest"]


def test_the_previews_equations_are_as_the_page_says(cache):
    rgb_NHW3 = np.random.default_rng(0).random((6, 2, 3, 3), np.float32)[[0, 1, 3, 4, 5]]
    latent_NCHW = open_cache(cache).read(np.arange(5)).astype(np.float64)
    v = np.concatenate([latent_NCHW, np.ones_like(latent_NCHW[:, :1])], axis=1)[:, :, ::2, ::2]
    v, t = v.transpose(0, 2, 3, 1).reshape(-1, 3), rgb_NHW3[:, ::2, ::2].astype(np.float64).reshape(-1, 3)
    footers = [pq.read_metadata(path).metadata[b"encode_once.sums"] for path in sorted((cache / "samples").iterdir())]
    numbers = [np.frombuffer(base64.b64decode(each), "<f8") for each in footers]
    equations = sum(each[1 + 4 * 2 :].reshape(3, 6) for each in numbers)
    gram, moment = equations[:, :3], equations[:, 3:]
    assert sum(each[0] for each in numbers) == 5 * 2 * 3
    np.testing.assert_allclose(sum(each[1:3] for each in numbers), latent_NCHW.sum((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(gram, v.T @ v, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moment, v.T @ t, rtol=1e-12, atol=1e-12)
    g = np.diag(gram)
    solution = np.linalg.solve(gram + 1e-6 * np.diag(g + g.mean()), moment)
    preview = load(cache / "seal.json")["array"]["preview"]
    np.testing.assert_allclose(solution, [*np.transpose(preview["weight"]), preview["bias"]], rtol=1e-9)


def write_golden(path: Path, shapes: list[tuple[int, ...]], gone: Sequence[str] = (), **options: Any) -> Path:
    """Write six rows of each size in shards of at most four, row 2 rejected, and withdraw those that are `gone`."""
    make_cache(path, [*map(golden_latents, shapes)], rejected=[2], samples_per_shard=4, **options)
    deque(withdraw([path], gone) if gone else ())
    return path


def golden_latents(shape: tuple[int, ...]) -> np.ndarray:
    """[6, *shape], every value exact in float16; neighbouring values of a channel are equally far apart."""
    count = 6 * math.prod(shape)
    return (np.arange(count, dtype=np.float32).reshape(6, *shape) - count // 2) / 8


golden = pytest.mark.parametrize("name", GOLDEN)


@golden
def test_a_golden_cache_is_sound_and_reads_as_it_was_written(name, read_row):
    """The page's reader has no Parquet, which uint8 needs."""
    path, shapes = HERE / f"golden_{name}", GOLDEN[name]["shapes"]
    assert not verify(path, "deep").findings
    cache = open_cache(path)
    assert cache.seal.identity == IDENTITIES[name]
    rows = cache.samples(np.arange(len(cache)), ["row"])["row"].to_numpy()
    lacking = {2, *(int(each.rpartition("-")[2]) for each in GOLDEN[name].get("gone", ()))}
    assert rows.tolist() == [row for row in range(6 * len(shapes)) if row not in lacking]
    for number, (shape, array) in enumerate(zip(shapes, cache.arrays, strict=True)):
        mine = np.flatnonzero(rows // 6 == number)
        expected = golden_latents(shape).astype(np.float16)[rows[mine] % 6]
        assert array.shape == shape
        if name == "uint8":
            np.testing.assert_allclose(cache.read(mine), expected, rtol=1e-6)
            continue
        np.testing.assert_array_equal(cache.read(mine), expected)
        np.testing.assert_array_equal(np.stack([read_row(path, row) for row in rows[mine]]), expected)


def test_samples_of_several_sizes_are_not_read_together():
    cache = open_cache(HERE / "golden_sizes")
    with pytest.raises(ValueError, match=r"must have one size; these have: 24x16, 8x32"):
        cache.read(np.array([0, 10]))


def test_zarr_reads_each_size_as_an_array():
    group = zarr.open_group(HERE / "golden_sizes", mode="r")
    for name, shape in zip(("24x16", "8x32"), (IMAGE, WIDE), strict=True):
        found = group["latents"][name][:]
        expected = golden_latents(shape).astype(np.float16)
        if name == "24x16":
            expected[2] = np.nan
        np.testing.assert_array_equal(found, expected)


@golden
def test_todays_code_writes_the_golden_bytes(tmp_path, name):
    """Except files that depend on clock or host; Parquet files, which depend on the writer, hold equal tables."""
    folder, cache = HERE / f"golden_{name}", write_golden(tmp_path / "cache", **GOLDEN[name])
    written, expected = contents(cache), contents(folder)
    assert written.keys() == expected.keys()
    for file in expected:
        if file.endswith(".parquet"):
            assert pq.read_table(cache / file).equals(pq.read_table(folder / file)), file
            sums = [pq.read_metadata(root / file).metadata.get(b"encode_once.sums") for root in (cache, folder)]
            assert sums[0] == sums[1], file
        elif not file.startswith(("commits/", "seal.json", "shards.bin", "texts.json")):
            assert written[file] == expected[file], file


if __name__ == "__main__":
    for name, options in GOLDEN.items():
        shutil.rmtree(HERE / f"golden_{name}", ignore_errors=True)
        print(f'    "{name}": "{open_cache(write_golden(HERE / f"golden_{name}", **options)).seal.identity}",')
