"""Bytes that are others, or fewer, or more: each is named by its file, and inside a sample by its row."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_store.cache.metadata import read_spec
from cache_store.errors import NewerFormatError
from cache_store.verify.findings import Finding, Level
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
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


def shard_of(cache: Path, name: str) -> int | None:
    shards = range(read_spec(cache).num_shards)
    return next((shard for shard in shards if name in (each(cache, shard) for each in SHARD_FILES)), None)


def rows_at(cache: Path, name: str, size: int) -> Iterator[tuple[range, int]]:
    """Bytes of a shard file that belong to a row, headers, checksums and index entries too."""
    shard = shard_of(cache, name)
    if shard is None or name != shard_name(cache, shard):
        return
    spec = read_spec(cache)
    index = size - 4 - 16 * ROWS_PER_SHARD
    before, after = (0, 4) if spec.store_format == "zarr" else (512 + 128, 0)
    for sample in samples_in(cache, shard):
        yield range(sample.offset - before, sample.end + after), sample.row
        if spec.store_format == "zarr":
            entry = index + 16 * (sample.row - spec.shard_rows(shard).start)
            yield range(entry, entry + 16), sample.row


def test_any_flipped_bit_is_named_by_its_file_and_row_alone(cache, form):
    rng = np.random.default_rng(1)
    names = files_of(cache)
    for number in range(FLIPS[form[0]]):
        name = names[number % len(names)]
        data = (cache / name).read_bytes()
        position, bit = int(rng.integers(len(data))), int(rng.integers(8))
        expected = {row for span, row in rows_at(cache, name, len(data)) if position in span}
        shard = shard_of(cache, name)
        (cache / name).write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
        findings = damage_found(cache)
        (cache / name).write_bytes(data)
        where = f"{name}: bit {bit} of byte {position}"
        assert named(findings) == {name}, f"{where}: {findings}"
        assert {finding.shard for finding in findings} == {shard}, f"{where}: {findings}"
        assert expected <= rows_named(findings), f"{where}: {findings}"
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
