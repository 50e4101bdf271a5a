"""Bytes that are others, or fewer, or more: each is named by its file, and inside a sample by its row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import NewerFormatError
from cache_store.verify.findings import Finding, Level
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    ROWS,
    ROWS_PER_SHARD,
    SHARD,
    SHARD_FILES,
    files_of,
    named,
    record_file,
    rows_named,
    samples_in,
)

FLIPS = {"zarr": 500, "webdataset": 1_000}
"""A thousand in each form; Zarr's are shared by two codecs."""


def damage_found(cache: Path, level: Level = "full") -> tuple[Finding, ...]:
    """Also where the cache is refused in one line, as one of another format version is."""
    try:
        return verify(cache, level).findings
    except NewerFormatError as error:
        file, _, problem = str(error).removeprefix(f"{cache}/").partition(" ")
        return (Finding(file=file, problem=problem),)


def rows_at(cache: Path, shard: int) -> list[tuple[range, int]]:
    """Bytes of a shard file that belong to a row, headers, checksums and index entries too."""
    spans, samples = [], samples_in(cache, shard)
    is_zarr = (cache / "latents").is_dir()
    before, after = (0, 4) if is_zarr else (512 + 128, 0)
    index = (cache / shard_name(cache, shard)).stat().st_size - 4 - 16 * ROWS_PER_SHARD
    spans += [(range(sample.offset - before, sample.end + after), sample.row) for sample in samples]
    if is_zarr:
        spans += [(range(index + 16 * each.slot, index + 16 * each.slot + 16), each.row) for each in samples]
    return spans


def test_any_flipped_bit_is_named_by_its_file_and_row_alone(cache, form):
    rng = np.random.default_rng(1)
    names, shards = files_of(cache), range(-(-ROWS // ROWS_PER_SHARD))
    shard_of = {kind(cache, shard): shard for kind in SHARD_FILES for shard in shards}
    spans = {shard_name(cache, shard): rows_at(cache, shard) for shard in shards}
    for number in range(FLIPS[form[0]]):
        name = names[number % len(names)]
        data = (cache / name).read_bytes()
        position, bit = int(rng.integers(len(data))), int(rng.integers(8))
        (cache / name).write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
        findings = damage_found(cache)
        (cache / name).write_bytes(data)
        where = f"{name}: bit {bit} of byte {position}: {findings}"
        assert named(findings) == {name}, where
        assert {finding.shard for finding in findings} == {shard_of.get(name)}, where
        assert {row for span, row in spans.get(name, ()) if position in span} <= rows_named(findings), where
    assert not verify(cache, "full").findings


SIZES: dict[str, Callable[[bytes], bytes]] = {
    "cut by one": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "longer by a byte": lambda data: data + b"x",
    "longer by zeros": lambda data: data + bytes(10_240),
}


@pytest.mark.parametrize("damage", SIZES)
def test_a_file_of_another_size_is_named_whatever_it_is(cache, damage):
    for name in files_of(cache):
        data = (cache / name).read_bytes()
        (cache / name).write_bytes(SIZES[damage](data))
        for level in LEVELS:
            assert name in named(damage_found(cache, level)), name
        (cache / name).write_bytes(data)


def test_bytes_behind_a_shard_blame_none_of_its_rows(cache):
    path = cache / shard_name(cache, SHARD)
    path.write_bytes(path.read_bytes() + b"x")
    size = path.stat().st_size
    for level in ("full", "deep"):
        (finding,) = verify(cache, level).findings
        assert (finding.row, finding.problem) == (None, f"is {size} bytes, expected {size - 1}")
    (cache / record_file(cache, SHARD)).unlink()
    assert not rows_named(verify(cache, "full").findings), "nor where no record tells the size"


def test_a_cut_shard_names_the_rows_that_it_lost(cache):
    name, samples = shard_name(cache, SHARD), samples_in(cache, SHARD)
    (cache / name).write_bytes((cache / name).read_bytes()[: samples[2].end - 1])
    assert {sample.row for sample in samples[2:]} <= rows_named(verify(cache, "full").findings)


def test_a_damaged_plan_of_an_unsealed_cache_blames_no_shard(cache):
    """No hash of it is known then, and no row of a shard is wrong for it."""
    (cache / "seal.json").unlink()
    data, found = (cache / "plan.parquet").read_bytes(), 0
    for position in range(0, len(data), 29):
        flip(cache / "plan.parquet", position)
        blamed = named(verify(cache, "full").findings) - {"seal.json"}
        (cache / "plan.parquet").write_bytes(data)
        assert blamed <= {"plan.parquet"}, f"byte {position}: {blamed}"
        found += bool(blamed)
    assert found > len(data) / 29 / 2
