"""Rows that are swapped or changed inside a shard, in its samples table, in both, and under a record made for them."""

from pathlib import Path

import numpy as np
import pytest

from cache_store.format.checksum import crc32c
from cache_store.format.schema import samples_file
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name
from tests.cache_store.signing import edited_rows, load, refile, resign, save_signed
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

TABLE = samples_file(SHARD)


def two_samples(cache: Path) -> tuple[Sample, Sample]:
    """Of one shard and of equal length, so that one fits in the other's place."""
    first, *others = samples_in(cache, SHARD)
    return first, next(each for each in others if each.end - each.offset == first.end - first.offset)


def swap_samples(cache: Path, *samples: Sample) -> None:
    """In the shard file, each with the crc32c behind it where the form has one there."""
    path, extra = cache / shard_name(cache, SHARD), 4 if (cache / "latents").is_dir() else 0
    data = bytearray(path.read_bytes())
    first, second = (slice(sample.offset, sample.end + extra) for sample in samples)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)


def swap_columns(cache: Path, columns: tuple[str, ...], *samples: Sample) -> None:
    """Two rows' values in the samples table."""
    first, second = (sample.slot for sample in samples)
    with edited_rows(cache / TABLE) as rows:
        for name in columns:
            rows[first][name], rows[second][name] = rows[second][name], rows[first][name]


def fit_record(cache: Path) -> None:
    """Make the record one of the files as they are."""
    record = load(cache / record_file(cache, SHARD))
    for file in record["content"]["files"]:
        refile(cache, file)
    save_signed(cache / record_file(cache, SHARD), record)


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
    samples, files = two_samples(cache), set()
    if in_shard:
        swap_samples(cache, *samples)
        files.add(shard_name(cache, SHARD))
    if columns:
        swap_columns(cache, columns, *samples)
        files.add(TABLE)
    findings = verify(cache, "full").findings
    assert files <= named(findings)
    assert not are_rows_named or {sample.row for sample in samples} <= rows_named(findings)


def test_swapped_rows_are_found_even_under_a_record_made_for_them(cache):
    samples = two_samples(cache)
    swap_samples(cache, *samples)
    swap_columns(cache, ("crc32c",), *samples)
    fit_record(cache)
    for level in LEVELS:
        assert named(verify(cache, level).findings) == {record_file(cache, SHARD)}


def test_deep_finds_a_shard_and_a_table_that_differ_under_hashes(cache):
    samples = two_samples(cache)
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
    with edited_rows(cache / TABLE) as rows:
        rows[sample.slot]["crc32c"] ^= 1
    findings = verify(cache, "full").findings
    assert named(findings) == {TABLE}
    assert rows_named(findings) == {sample.row}


def test_a_shard_of_one_row_names_that_row(form, tmp_path):
    cache = make_small(tmp_path / "cache", form, samples_per_shard=1)
    with edited_rows(cache / TABLE) as rows:
        rows[0]["id"] = "other"
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
    with edited_rows(cache / TABLE) as rows:
        rows[sample.slot]["crc32c"] = checksum
    resign(cache)
    assert not verify(cache, "full").findings
    (finding,) = verify(cache, "deep").findings
    assert (finding.file, finding.row) == (shard_name(cache, SHARD), sample.row)
    assert finding.problem == "holds 1 non-finite values"
