"""docs/format.md is the specification: its reader reads both forms and finds damage, its tables name every field."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_store.format.codec import zarr_codecs
from cache_store.format.record import Record
from cache_store.format.schema import PLAN_SCHEMA, SAMPLES_SCHEMA, CommitRun, Spec, StoreFormat
from tests.cache_store.conftest import SHAPES, samples_of, shard_name, swap
from tests.make_cache import make_cache

PAGE = (Path(__file__).parents[3] / "docs/format.md").read_text()
GOLDEN = Path(__file__).parent / "golden"
RECORDS = [Spec, *(record for record in Record.__subclasses__() if record.__module__ == Spec.__module__)]
ROWS, REJECTED, SAMPLES_PER_SHARD = 10, (2, 9), 4
CACHED = [row for row in range(ROWS) if row not in REJECTED]

ReadRow = Callable[..., np.ndarray | None]


def page_code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def read_row() -> ReadRow:
    """The page's reader, as a stranger would paste it."""
    (code,) = page_code("python")
    names: dict[str, ReadRow] = {}
    exec(code, names)
    return names["read_row"]


@pytest.fixture
def cache(store_format: StoreFormat, tmp_path: Path) -> Path:
    return small_cache(tmp_path / "cache", store_format)


def small_cache(path: Path, store_format: StoreFormat) -> Path:
    latents = np.random.default_rng(0).standard_normal((ROWS, 4, 3, 5), np.float32)
    return make_cache(path, latents, rejected=REJECTED, samples_per_shard=SAMPLES_PER_SHARD, store_format=store_format)


def shard_path(cache: Path, shard: int) -> Path:
    return cache / shard_name(cache, shard)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_pages_reader_reads_samples_of_any_axes(tmp_path, store_format, shape, read_row):
    samples = samples_of(shape, ROWS)
    path = make_cache(tmp_path / "cache", samples, rejected=REJECTED, store_format=store_format)
    assert [row for row in range(ROWS) if read_row(path, row) is None] == [*REJECTED]
    found = np.stack([read_row(path, row) for row in CACHED])
    np.testing.assert_array_equal(found, samples[CACHED].astype(np.float16), strict=True)


def test_the_pages_reader_finds_every_flipped_bit(cache, read_row):
    """Random bits of the shard, the seal and what the reader uses of the record and the spec."""
    random = np.random.default_rng(0)
    commit = cache / "commits/000001.json"
    content_end = commit.read_bytes().rindex(b',"format_version"')
    for path, start, end in (
        (shard_path(cache, 1), 0, None),
        (cache / "seal.json", 0, None),
        (commit, len('{"content":'), content_end),
    ):
        good = path.read_bytes()
        for position in random.integers(start, end or len(good), 160):
            data = bytearray(good)
            data[position] ^= 1 << random.integers(8)
            path.write_bytes(data)
            with pytest.raises(AssertionError, match="damaged"):
                read_row(cache, 4)
        path.write_bytes(good)
    assert read_row(cache, 4) is not None


@pytest.mark.parametrize("left", [0, 1, 100, -1, -4, -600])
def test_a_cut_shard_is_damage_to_the_pages_reader(cache, read_row, left):
    path = shard_path(cache, 1)
    path.write_bytes(path.read_bytes()[:left])
    for row in (4, 7):
        with pytest.raises(AssertionError, match="the file of shard 1 is damaged"):
            read_row(cache, row)


def test_swapped_shards_and_no_seal_are_damage_to_the_pages_reader(cache, read_row):
    """Every CRC32C of a Zarr shard is right there."""
    swap(shard_path(cache, 0), shard_path(cache, 1))
    for row in (0, 2, 4):
        with pytest.raises(AssertionError, match="is damaged"):
            read_row(cache, row)
    swap(shard_path(cache, 0), shard_path(cache, 1))
    (cache / "seal.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"seal\.json"):
        read_row(cache, 0)


def test_the_pages_reader_is_short_and_needs_numpy_alone():
    (code,) = page_code("python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imported == {"hashlib", "io", "json", "tarfile", "pathlib", "numpy"}


def test_the_page_names_every_field_of_every_record_and_table():
    words = set(re.findall(r"`\W*(\w+)`", PAGE))
    assert {Spec, CommitRun} < set(RECORDS)
    fields = {name for record in RECORDS for name in record.__struct_fields__}
    missing = (fields | {*PLAN_SCHEMA.names, *SAMPLES_SCHEMA.names}) - words
    assert not missing, sorted(missing)


def test_an_arrays_metadata_is_what_the_page_shows():
    metadata, blosc = map(json.loads, page_code("json"))
    assert metadata == json.loads((GOLDEN / "latents/zarr.json").read_text())
    assert blosc in zarr_codecs("zstd", 2)
    group = json.loads((GOLDEN / "zarr.json").read_text())
    inline = {"kind": "inline", "must_understand": False, "metadata": {"latents": metadata}}
    group["attributes"].pop("encode_once")
    assert group == {"attributes": {}, "consolidated_metadata": inline, "node_type": "group", "zarr_format": 3}
