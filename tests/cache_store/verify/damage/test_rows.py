"""Rows that are swapped or changed inside a shard, in its samples table, in both, and under a record made for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from cache_store.cache.files import file_record
from cache_store.cache.metadata import read_commit, read_spec
from cache_store.format.checksum import crc32c
from cache_store.format.record import canonical_json, signed
from cache_store.format.schema import commit_file, samples_file
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name
from tests.cache_store.signing import resign
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    SHARD,
    Sample,
    make_small,
    named,
    record_file,
    rows_named,
    samples_in,
)


def equal_samples(cache: Path) -> tuple[Sample, Sample]:
    """Two samples of one shard of equal length, so that one fits in the other's place."""
    samples = samples_in(cache, SHARD)
    first = samples[0]
    return first, next(each for each in samples[1:] if each.end - each.offset == first.end - first.offset)


def swap_samples(cache: Path, *samples: Sample) -> None:
    """In the shard file, each with the crc32c behind it where the form has one there."""
    path = cache / shard_name(cache, SHARD)
    data, extra = bytearray(path.read_bytes()), 4 if read_spec(cache).store_format == "zarr" else 0
    first, second = (data[sample.offset : sample.end + extra] for sample in samples)
    data[samples[0].offset : samples[0].end + extra] = second
    data[samples[1].offset : samples[1].end + extra] = first
    path.write_bytes(data)


def swap_columns(cache: Path, columns: tuple[str, ...], *samples: Sample) -> None:
    """Two rows' values in the samples table."""
    first, second = (slot_of(cache, sample) for sample in samples)
    for name in columns:
        with edited_column(cache, name) as values:
            values[first], values[second] = values[second], values[first]


def slot_of(cache: Path, sample: Sample) -> int:
    return sample.row - read_spec(cache).shard_rows(SHARD).start


@contextmanager
def edited_column(cache: Path, name: str) -> Iterator[list[Any]]:
    """Of the samples table, to change in place."""
    path = cache / samples_file(SHARD)
    table = pq.read_table(path, partitioning=None)
    values, field = table[name].to_pylist(), table.schema.field(name)
    yield values
    table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    pq.write_table(table, path, compression="zstd")


def fit_record(cache: Path) -> None:
    """Make the record one of the files as they are."""
    record = read_commit(cache, SHARD)
    assert record is not None
    files = tuple(file_record(LocalStore(cache), file.path) for file in record.content.files)
    fit = signed(replace(record, content=replace(record.content, files=files)))
    LocalStore(cache).put_whole(commit_file(SHARD), canonical_json(fit))


@pytest.mark.parametrize(
    ("in_shard", "columns", "are_rows_named"),
    [
        (True, (), True),
        (False, ("offset", "length", "crc32c"), True),
        (False, ("id",), True),
        (True, ("crc32c",), False),
    ],
    ids=["in the shard", "in the table", "ids", "in both, so that only the two files' hashes are left to tell"],
)
def test_two_swapped_rows_are_named_by_row_or_file(cache, in_shard, columns, are_rows_named):
    samples = equal_samples(cache)
    if in_shard:
        swap_samples(cache, *samples)
    swap_columns(cache, columns, *samples)
    findings = verify(cache, "full").findings
    files = [shard_name(cache, SHARD)] * in_shard + [samples_file(SHARD)] * bool(columns)
    assert {*files} <= named(findings)
    assert not are_rows_named or {sample.row for sample in samples} <= rows_named(findings)


def test_swapped_rows_are_found_even_under_a_record_made_for_them(cache):
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    swap_columns(cache, ("crc32c",), *samples)
    fit_record(cache)
    for level in LEVELS:
        assert named(verify(cache, level).findings) == {record_file(cache, SHARD)}


def test_deep_finds_a_shard_and_a_table_that_differ_under_hashes(cache):
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    fit_record(cache)
    (cache / "seal.json").unlink()
    assert named(verify(cache, "full").findings) == {"seal.json"}, "every hash is right"
    findings = verify(cache, "deep").findings
    assert named(findings) == {shard_name(cache, SHARD), "seal.json"}
    assert rows_named(findings) == {sample.row for sample in samples}


def test_rows_of_a_damaged_samples_table_are_its_own_fault(cache):
    """The shard file has its hash; what the table says of it is what is wrong."""
    sample = samples_in(cache, SHARD)[0]
    with edited_column(cache, "crc32c") as checksums:
        checksums[slot_of(cache, sample)] ^= 1
    findings = verify(cache, "full").findings
    assert named(findings) == {samples_file(SHARD)}
    assert rows_named(findings) == {sample.row}


def test_a_shard_of_one_row_names_that_row(form, tmp_path):
    cache = make_small(tmp_path / "cache", form, samples_per_shard=1)
    with edited_column(cache, "id") as ids:
        ids[0] = "other"
    assert rows_named(verify(cache, "full").findings) == {SHARD}


def test_values_wrong_under_right_hashes_are_found_by_deep_alone(store_format, tmp_path):
    """As an encoder with a fault would have written them."""
    cache = make_small(tmp_path / "cache", (store_format, "none"))
    sample, path = samples_in(cache, SHARD)[1], cache / shard_name(cache, SHARD)
    data = bytearray(path.read_bytes())
    data[sample.offset : sample.offset + 2] = np.float16(np.nan).tobytes()
    checksum = crc32c(bytes(data[sample.offset : sample.end]))
    if store_format == "zarr":
        data[sample.end : sample.end + 4] = checksum.to_bytes(4, "little")
    path.write_bytes(data)
    with edited_column(cache, "crc32c") as checksums:
        checksums[slot_of(cache, sample)] = checksum
    resign(cache)
    assert not verify(cache, "full").findings
    (finding,) = verify(cache, "deep").findings
    assert (finding.file, finding.row) == (shard_name(cache, SHARD), sample.row)
    assert finding.problem == "holds 1 non-finite values"
