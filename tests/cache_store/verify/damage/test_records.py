"""Commit records and seals that are lost, another shard's, or edited, with and without a hash of their own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cache_store.cache.metadata import read_seal, read_spec
from cache_store.cache.seal import seal_cache
from cache_store.format.record import canonical_json, signed
from cache_store.format.schema import Seal
from cache_store.storage.publish import write_file
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.signing import load, save, save_signed
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    SHARD,
    halve,
    named,
    record_file,
    rows_named,
    samples_in,
    table_file,
)


@pytest.mark.parametrize("lose", [Path.unlink, halve])
def test_a_flipped_latent_beside_a_lost_record_is_named_by_its_row(cache, lose):
    sample = samples_in(cache, SHARD)[1]
    flip(cache / shard_name(cache, SHARD), sample.offset)
    lose(cache / record_file(cache, SHARD))
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), shard_name(cache, SHARD)}
    assert rows_named(findings) == {sample.row}


def test_a_shard_is_looked_at_under_a_record_of_other_files(cache):
    sample = samples_in(cache, SHARD)[1]
    flip(cache / shard_name(cache, SHARD), sample.offset)
    shutil.copy(cache / record_file(cache, 0), cache / record_file(cache, SHARD))
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), shard_name(cache, SHARD)}
    assert rows_named(findings) == {sample.row}


def test_what_can_not_be_checked_without_record_and_table_is_said(cache):
    flip(cache / shard_name(cache, SHARD), samples_in(cache, SHARD)[1].offset)
    for name in (record_file(cache, SHARD), table_file(cache, SHARD)):
        halve(cache / name)
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), table_file(cache, SHARD)}
    assert f"{shard_name(cache, SHARD)} was not looked at" in "".join(finding.problem for finding in findings)


def bump(values: tuple[float, ...]) -> tuple[float, ...]:
    return (values[0] + 1e-3, *values[1:])


RECORD_EDITS: dict[str, dict[str, Any]] = {
    "shard": {"shard": 0},
    "recipe": {"recipe.array.image.height": 7},
    "plan digest": {"plan_digest": "0" * 64},
    "rows digest": {"rows_digest": "0" * 64},
    "a file's path": {"files.0.path": "../x"},
    "a file's size": {"files.0.bytes": 7},
    "a file's hash": {"files.1.sha256": "0" * 64},
    "no files": {"files": []},
    "counts": {"cached": 6, "rejected": 0, "reasons": {}},
    "negative counts": {"cached": -1, "rejected": 7, "reasons": {"missing": 7}},
    "reasons": {"reasons": {"too large": 1}},
    "non-finite": {"non_finite": 3},
    "sum": {"statistics.sum.0": 0.25},
    "maximum": {"statistics.maximum.3": 9.0},
    "count": {"statistics.count": 1},
    "a channel less": {"statistics.sum": [0.0, 0.0, 0.0]},
    "no statistics": {"statistics": None},
    "preview": {"preview.moment.0.0": 0.25},
    "no preview": {"preview": None},
}


@pytest.mark.parametrize("edit", RECORD_EDITS)
@pytest.mark.parametrize("resign", [True, False])
def test_an_edited_record_is_named_with_and_without_a_hash_of_its_own(cache, edit, resign):
    name = record_file(cache, SHARD)
    record = load(cache / name)
    for field, value in RECORD_EDITS[edit].items():
        set_field(record["content"], field, value)
    (save_signed if resign else save)(cache / name, record)
    for level in LEVELS:
        findings = verify(cache, level).findings
        assert name in named(findings)
        assert {finding.shard for finding in findings} == {SHARD}


def set_field(record: Any, field: str, value: object) -> None:
    """By its path, as `files.0.bytes`."""
    *parents, last = (int(part) if part.isdigit() else part for part in field.split("."))
    for part in parents:
        record = record[part]
    record[last] = value


SEAL_EDITS: dict[str, Callable[[Seal], Seal]] = {
    "spec digest": lambda seal: replace(seal, spec_digest="0" * 64),
    "identity": lambda seal: replace(seal, identity="0" * 64),
    "counts": lambda seal: replace(seal, cached=seal.cached + 1, rejected=seal.rejected - 1),
    "planned": lambda seal: replace(seal, planned=99),
    "reasons": lambda seal: replace(seal, reasons={}),
    "shards' counts": lambda seal: replace(seal, cached_per_shard=seal.cached_per_shard[::-1]),
    "records": lambda seal: replace(seal, commits=seal.commits[::-1]),
    "no records": lambda seal: replace(seal, commits=()),
    "plan": lambda seal: replace(seal, plan_file=replace(seal.plan_file, sha256="0" * 64)),
    "plan's path": lambda seal: replace(seal, plan_file=replace(seal.plan_file, path="build.json")),
    "mean": lambda seal: edited_summary(seal, channel_mean=bump(seal.array.channel_mean)),
    "maximum": lambda seal: edited_summary(seal, maximum=bump(seal.array.maximum)),
    "preview": lambda seal: edited_summary(seal, rgb_bias=bump(seal.array.rgb_bias)),
    "bytes": lambda seal: edited_summary(seal, bytes=1),
}


def edited_summary(seal: Seal, **fields: Any) -> Seal:
    return replace(seal, array=replace(seal.array, **fields))


@pytest.mark.parametrize("edit", SEAL_EDITS)
@pytest.mark.parametrize("resign", [True, False])
def test_an_edited_seal_is_named_with_and_without_a_hash_of_its_own(cache, edit, resign):
    edited = SEAL_EDITS[edit](read_seal(cache))
    write_file(cache / "seal.json", canonical_json(signed(edited) if resign else edited))
    for level in LEVELS:
        findings = verify(cache, level).findings
        assert "seal.json" in named(findings)
        assert {finding.shard for finding in findings} == {None}


@pytest.mark.parametrize("field", ["sum", "sum_of_squares", "minimum", "maximum"])
def test_statistics_of_other_values_are_found_by_deep_alone(cache, field):
    """Signed, and sealed."""
    name = record_file(cache, SHARD)
    record = load(cache / name)
    record["content"]["statistics"][field][0] += 1e-5
    save_signed(cache / name, record)
    seal_cache(cache, read_spec(cache))
    assert not verify(cache, "full").findings
    (finding,) = verify(cache, "deep").findings
    assert (finding.file, finding.problem) == (name, "statistics do not follow from the shard's samples")
