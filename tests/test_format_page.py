"""docs/format.md is the specification: its reader reads both forms, its tables name every field there is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.schema import (
    PLAN_SCHEMA,
    SAMPLES_SCHEMA,
    ArraySpec,
    ArraySummary,
    ChannelStatistics,
    CommitContent,
    EncoderIdentity,
    FileRecord,
    ImageRecipe,
    PreviewEquations,
    Seal,
    Spec,
    StoreFormat,
)
from tests.make_cache import make_cache

PAGE = (Path(__file__).parent.parent / "docs/format.md").read_text()
RECORDS = (
    Spec,
    ArraySpec,
    ImageRecipe,
    EncoderIdentity,
    CommitContent,
    FileRecord,
    ChannelStatistics,
    PreviewEquations,
    Seal,
    ArraySummary,
)
SAMPLES_PER_SHARD = 4


@pytest.fixture
def read_row() -> Callable[..., np.ndarray | None]:
    """The page's reader, as a stranger would paste it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Callable[..., np.ndarray | None]] = {}
    exec(code, names)
    return names["read_row"]


@pytest.fixture(params=get_args(StoreFormat))
def cache(request, tmp_path) -> Path:
    latents = np.random.default_rng(0).standard_normal((10, 4, 3, 5), np.float32)
    return make_cache(
        tmp_path / "cache",
        latents,
        rejected=[2, 9],
        samples_per_shard=SAMPLES_PER_SHARD,
        store_format=request.param,
    )


def test_the_pages_reader_reads_what_ours_reads(cache, read_row):
    rows = [row for row in range(10) if row not in (2, 9)]
    found = np.stack([read_row(cache, row) for row in rows])
    np.testing.assert_array_equal(found, open_cache(cache).read(np.arange(8)))
    assert read_row(cache, 2) is read_row(cache, 9) is None


@pytest.mark.parametrize("cache", ["zarr"], indirect=True)
def test_the_pages_reader_finds_damage(cache, read_row):
    shard = cache / "latents/c/1/0/0/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(AssertionError, match="row 4 is damaged"):
        read_row(cache, 4)


def test_the_pages_reader_is_short_and_needs_numpy_alone():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) == {
        "io",
        "json",
        "tarfile",
        "pathlib",
        "numpy",
    }


def test_the_page_names_every_field_of_every_record_and_table():
    words = set(re.findall(r"`\W*(\w+)`", PAGE))
    fields = {name for record in RECORDS for name in record.__struct_fields__}
    missing = (fields | {*PLAN_SCHEMA.names, *SAMPLES_SCHEMA.names}) - words
    assert not missing, sorted(missing)
