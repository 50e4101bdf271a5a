"""Commit records and seals that are lost, another shard's, or edited, with and without a hash of their own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.signing import load, save, save_signed, set_field
from tests.cache_store.verify.damage.conftest import (
    LEVELS,
    SHARD,
    halve,
    named,
    record_file,
    rows_named,
    samples_in,
    seal_file,
    table_file,
)
from tests.make_cache import seal_cache


def put_another_shards(path: Path) -> None:
    shutil.copy(path.parent / "000000.json", path)


@pytest.mark.parametrize("damage", [Path.unlink, halve, put_another_shards])
def test_a_flipped_latent_beside_a_bad_record_is_named_by_its_row(cache, damage):
    sample = samples_in(cache, SHARD)[1]
    flip(cache / shard_name(cache, SHARD), sample.offset)
    damage(cache / record_file(cache, SHARD))
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


def plus(change: float) -> Callable[[float], float]:
    return lambda value: value + change


def backwards(values: list[Any]) -> list[Any]:
    return values[::-1]


RECORD_EDITS: list[dict[str, Any]] = [
    *({field: "0" * 64} for field in ("plan_digest", "rows_digest", "files.1.sha256")),
    *({field: None} for field in ("statistics", "preview")),
    *({field: 0.25} for field in ("statistics.sum.0", "preview.moment.0.0")),
    *({field: 7} for field in ("recipe.array.image.height", "files.0.bytes")),
    *({"shard": 0}, {"files.0.path": "../x"}, {"files": []}, {"reasons": {"too large": 1}}, {"non_finite": 3}),
    *({"statistics.maximum.3": 9.0}, {"statistics.count": 1}, {"statistics.sum": [0.0, 0.0, 0.0]}),
    {"cached": 6, "rejected": 0, "reasons": {}},
    {"cached": -1, "rejected": 7, "reasons": {"missing": 7}},
]
SEAL_EDITS: list[dict[str, Any]] = [
    *({field: "0" * 64} for field in ("spec_digest", "identity", "plan_file.sha256")),
    *({field: backwards} for field in ("cached_per_shard", "commits")),
    *({f"array.{field}.0": plus(1e-3)} for field in ("mean", "maximum", "preview.bias")),
    *({"planned": 99}, {"reasons": {}}, {"commits": []}, {"plan_file.path": "build.json"}, {"array.bytes": 1}),
    {"cached": plus(1), "rejected": plus(-1)},
]
EDITS = [(record_file, edits) for edits in RECORD_EDITS] + [(seal_file, edits) for edits in SEAL_EDITS]


@pytest.mark.parametrize(("file", "edits"), EDITS, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
@pytest.mark.parametrize("sign", [save_signed, save])
def test_an_edited_record_is_named_with_or_without_a_new_digest(cache, file, edits, sign):
    path = cache / file(cache, SHARD)
    record = load(path)
    for field, value in edits.items():
        set_field(record["content"] if file is record_file else record, field, value)
    sign(path, record)
    for level in LEVELS:
        findings = verify(cache, level).findings
        assert file(cache, SHARD) in named(findings)
        assert {finding.shard for finding in findings} == {SHARD if file is record_file else None}


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
