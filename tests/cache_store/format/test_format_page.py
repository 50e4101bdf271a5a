"""docs/format.md is the specification: its reader reads both formats and finds damage, its tables name every field, and
its rules hold, checked without this project's code. Small caches of each form, of one and of two sizes, are committed:
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import rfc8785
import zarr

from cache_store import open_cache
from cache_store.cache.metadata import write_build
from cache_store.format.array import ArraySpec, EncoderIdentity, StoreDtype
from cache_store.format.codec import zarr_codecs
from cache_store.format.record import Record
from cache_store.format.schema import CommitRun, Spec, StoreFormat
from cache_store.format.tables import PLAN_SCHEMA, SAMPLES_SCHEMA, SCALE_COLUMNS
from cache_store.verify.verify import verify
from tests.cache_store.conftest import SHAPES, contents, samples_of, shard_name, swap
from tests.make_cache import caption, make_cache

PAGE = (Path(__file__).parents[3] / "docs/format.md").read_text()
HERE = Path(__file__).parent
Golden = tuple[StoreFormat, int, StoreDtype]
"""Form, number of sizes and dtype of a golden cache."""
GOLDEN: dict[Golden, Path] = {
    ("zarr", 1, "float16"): HERE / "golden",
    ("webdataset", 1, "float16"): HERE / "golden_webdataset",
    ("zarr", 2, "float16"): HERE / "golden_sizes",
    ("webdataset", 2, "float16"): HERE / "golden_sizes_webdataset",
    ("zarr", 1, "uint8"): HERE / "golden_uint8",
}
IDENTITIES: dict[Golden, str] = {
    ("zarr", 1, "float16"): "2ab247585c4bc40cb3139d2c1060e6e118e42ba578c6242d6adbc22400888dbb",
    ("webdataset", 1, "float16"): "e10ef81d0e3a027cbf00ea8139f69d36e73aafb1f81bbc002a30105fb55d6320",
    ("zarr", 2, "float16"): "cb14fdea6d73c5e5da15d6a2ca7841ec8f3863f4eaccd483ad71ff8c960b0b53",
    ("webdataset", 2, "float16"): "63b54d3ff5b58c386178604bb126f6b2f1c24fb422996ac905b0bbe3e3305bfb",
    ("zarr", 1, "uint8"): "84adc227906910fafba9a760052a7d920d002569ae5b9bb1f5b20e31e0b69370",
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
    return write_golden(tmp_path / "cache", store_format, 1)


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
    missing = (fields | {*PLAN_SCHEMA.names, *SAMPLES_SCHEMA.names, *SCALE_COLUMNS}) - words
    assert not missing, sorted(missing)


def test_an_arrays_metadata_is_what_the_page_shows():
    metadata, blosc = map(json.loads, page_code("json"))
    assert metadata == load(GOLDEN["zarr", 1, "float16"] / "latents/24x16/zarr.json")
    assert blosc in zarr_codecs("zstd", 2)
    group = load(GOLDEN["zarr", 1, "float16"] / "zarr.json")
    latents = {"attributes": {}, "node_type": "group", "zarr_format": 3}
    arrays = {"latents": latents, "latents/24x16": metadata}
    inline = {"kind": "inline", "must_understand": False, "metadata": arrays}
    group["attributes"].pop("encode_once")
    assert group == {"attributes": {}, "consolidated_metadata": inline, "node_type": "group", "zarr_format": 3}


# The page's rules.


def digest(record: Any) -> str:
    return hashlib.sha256(rfc8785.dumps(record)).hexdigest()


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
    assert len(signed) == 3 + 2
    assert all(digest({**record, "sha256": ""}) == record["sha256"] for record in signed)
    spec, seal = records["zarr.json"]["attributes"]["encode_once"], records["seal.json"]
    contents = [records[f"commits/{shard:06d}.json"]["content"] for shard in range(3)]
    assert spec == seal["spec"]
    recipe = {name: value for name, value in spec.items() if name not in ("shards", "plan_digest", "arrays")}
    assert [recipe] * 3 == [each["recipe"] for each in contents]
    assert [digest(content) for content in contents] == seal["commits"]
    identity = hashlib.sha256("".join(seal["commits"]).encode()).hexdigest()
    assert identity == seal["identity"] == open_cache(path).seal.identity

    plan, planned = pq.read_table(path / "plan.parquet").to_pylist(), ("row", "id", "uri", "conversations")
    assert digest_of_lines(plan, *planned) == spec["plan_digest"]
    assert digest_of_lines(plan[4:8], *planned) == contents[1]["plan_digest"]
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


SIZES = ((2, 2, 3), (2, 4, 1))
"""Shapes of the golden samples."""


def write_golden(path: Path, store_format: StoreFormat, num_sizes: int, dtype: StoreDtype = "float16") -> Path:
    """Write six rows of each size in shards of at most four, row 2 rejected."""
    latents = [golden_latents(shape) for shape in SIZES[:num_sizes]]
    return make_cache(path, latents, rejected=[2], samples_per_shard=4, store_format=store_format, dtype=dtype)


def golden_latents(shape: tuple[int, ...]) -> np.ndarray:
    """[6, *shape], every value exact in float16; neighbouring values of a channel are equally far apart."""
    count = 6 * math.prod(shape)
    return (np.arange(count, dtype=np.float32).reshape(6, *shape) - count // 2) / 8


golden = pytest.mark.parametrize(("form", "num_sizes", "dtype"), GOLDEN)


@golden
def test_a_golden_cache_is_sound_and_reads_as_it_was_written(form, num_sizes, dtype, read_row):
    """The page's reader has no Parquet, which uint8 needs."""
    path = GOLDEN[form, num_sizes, dtype]
    assert not verify(path, "deep").findings
    cache, numbers = open_cache(path), np.arange(6 * num_sizes - 1)
    assert cache.seal.identity == IDENTITIES[form, num_sizes, dtype]
    for number, (shape, array) in enumerate(zip(SIZES, cache.arrays, strict=False)):
        mine = numbers[cache.array_indices(numbers) == number]
        expected = golden_latents(shape).astype(np.float16)
        expected = expected if number else np.delete(expected, 2, axis=0)
        assert array.shape == shape
        if dtype == "uint8":
            np.testing.assert_allclose(cache.read(mine), expected, rtol=1e-6)
            continue
        np.testing.assert_array_equal(cache.read(mine), expected)
        rows = cache.samples(mine, ["row"])["row"].to_pylist()
        np.testing.assert_array_equal(np.stack([read_row(path, row) for row in rows]), expected)


def test_samples_of_several_sizes_are_not_read_together():
    cache = open_cache(GOLDEN["zarr", 2, "float16"])
    with pytest.raises(ValueError, match=r"must have one size; these have: 24x16, 8x32"):
        cache.read(np.array([0, 10]))


def test_zarr_reads_each_size_as_an_array():
    group = zarr.open_group(GOLDEN["zarr", 2, "float16"], mode="r")
    for name, shape in zip(("24x16", "8x32"), SIZES, strict=True):
        found = group["latents"][name][:]
        expected = golden_latents(shape).astype(np.float16)
        if name == "24x16":
            expected[2] = np.nan
        np.testing.assert_array_equal(found, expected)


@golden
def test_todays_code_writes_the_golden_bytes(tmp_path, form, num_sizes, dtype):
    """Except files that depend on clock or host; Parquet files, which depend on the writer, hold equal tables."""
    folder, cache = GOLDEN[form, num_sizes, dtype], write_golden(tmp_path / "cache", form, num_sizes, dtype)
    written, expected = contents(cache), contents(folder)
    assert written.keys() == expected.keys()
    for name in expected:
        if name.endswith(".parquet"):
            assert pq.read_table(cache / name).equals(pq.read_table(folder / name)), name
            sums = [pq.read_metadata(root / name).metadata.get(b"encode_once.sums") for root in (cache, folder)]
            assert sums[0] == sums[1], name
        elif not name.startswith(("commits/", "seal.json")):
            assert written[name] == expected[name], name


if __name__ == "__main__":
    for key, folder in GOLDEN.items():
        shutil.rmtree(folder, ignore_errors=True)
        write_golden(folder, *key)
        print(*key, open_cache(folder).seal.identity)
