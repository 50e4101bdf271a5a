"""Damage is found and named; what each level promises."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from cache_store.cli import main
from cache_store.metadata import read_seal
from cache_store.publish import write_file
from cache_store.schema import Seal, canonical_json, commit_file, samples_file, signed
from cache_store.verify import verify
from tests.cache_store.conftest import shard_name
from tests.make_cache import make_cache

SHARD = 1


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize(
    ("store_format", "codec"), [("zarr", "none"), ("zarr", "lz4"), ("zarr", "zstd"), ("webdataset", "none")]
)
def test_a_sound_cache_has_no_findings(tmp_path, latents, store_format, codec, level):
    rejected = range(8, 16)
    path = make_cache(tmp_path / "cache", latents, rejected=rejected, store_format=store_format, codec=codec)
    report = verify(path, level)
    assert report.findings == ()
    assert (report.shards, report.samples) == (4, 22)


def test_a_flipped_bit_names_its_shard_and_row(cache):
    sample = pq.read_table(cache / "samples/000001.parquet", partitioning=None).to_pylist()[4]
    name = shard_name(cache, SHARD)
    flip(cache / name, sample["offset"] + 3)
    findings = verify(cache, "full").findings
    assert {(finding.shard, finding.row, finding.file) for finding in findings} == {(1, None, name), (1, 12, name)}


def test_every_single_bit_is_covered(cache):
    """Any bit of any file, records and metadata too."""
    rng = np.random.default_rng(0)
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    for path in files:
        data = path.read_bytes()
        for position in rng.choice(len(data), size=min(12, len(data)), replace=False):
            flip(path, int(position), int(rng.integers(8)))
            name = path.relative_to(cache).as_posix()
            assert finds_damage(cache, name), f"{name}: byte {position}"
            path.write_bytes(data)
    assert not verify(cache, "full").findings


def finds_damage(cache: Path, name: str) -> bool:
    """Through the command line, whose one-line refusal of a damaged spec counts too."""
    report = cache.parent / "report.json"
    report.unlink(missing_ok=True)
    code = main(["verify", str(cache), "--level", "full", "--report", str(report)])
    assert code in (0, 1)
    if code == 1 and name != "zarr.json":
        assert name in {finding["file"] for finding in json.loads(report.read_text())["findings"]}
    return code == 1


def truncate(cache: Path) -> str:
    path = cache / shard_name(cache, SHARD)
    path.write_bytes(path.read_bytes()[:-1])
    return shard_name(cache, SHARD)


def extend(cache: Path) -> str:
    with (cache / shard_name(cache, SHARD)).open("ab") as stream:
        stream.write(b"\0")
    return shard_name(cache, SHARD)


def delete(cache: Path) -> str:
    (cache / shard_name(cache, SHARD)).unlink()
    return shard_name(cache, SHARD)


def empty(cache: Path) -> str:
    (cache / shard_name(cache, SHARD)).write_bytes(b"")
    return shard_name(cache, SHARD)


def delete_record(cache: Path) -> str:
    (cache / "commits/latents/000002.json").unlink()
    return "commits/latents/000002.json"


def leave_scratch(cache: Path) -> str:
    (cache / "samples/.000001.parquet.1.partial").write_bytes(b"half")
    return "samples/.000001.parquet.1.partial"


def add_stranger(cache: Path) -> str:
    stranger = (cache / shard_name(cache, SHARD)).with_name("1")
    shutil.copy(cache / shard_name(cache, SHARD), stranger)
    return stranger.relative_to(cache).as_posix()


@pytest.mark.parametrize("damage", [truncate, extend, delete, empty, delete_record, leave_scratch, add_stranger])
def test_quick_verification_finds_what_sizes_and_names_show(cache, damage):
    name = damage(cache)
    assert name in {finding.file for finding in verify(cache, "quick").findings}


def test_two_swapped_shard_files_are_found(cache):
    first, second = (cache / shard_name(cache, shard) for shard in (0, 1))
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    assert {finding.shard for finding in verify(cache, "full").findings} == {0, 1}


def shard_files(cache: Path, shard: int) -> list[Path]:
    names = (shard_name(cache, shard), samples_file(shard), commit_file("latents", shard))
    return [cache / name for name in names]


def test_two_wholly_swapped_shards_are_found_even_quickly(cache):
    """Data, samples and record together: every crc and hash inside is right."""
    for first, second in zip(shard_files(cache, 0), shard_files(cache, 1), strict=True):
        spare = cache / "spare"
        first.rename(spare)
        second.rename(first)
        spare.rename(second)
    assert {finding.shard for finding in verify(cache, "quick").findings} == {0, 1}


def test_a_shard_of_another_cache_is_found(cache, tmp_path, latents, store_format):
    ids = [f"other-{row}" for row in range(len(latents))]
    other = make_cache(tmp_path / "other", latents, ids=ids, store_format=store_format)
    for theirs, ours in zip(shard_files(other, SHARD), shard_files(cache, SHARD), strict=True):
        shutil.copy(theirs, ours)
    assert [finding.file for finding in verify(cache, "quick").findings] == ["commits/latents/000001.json"]
    assert {finding.shard for finding in verify(cache, "full").findings} == {1}


def mean_moved(seal: Seal) -> Seal:
    summary = seal.arrays["latents"]
    means = (summary.channel_mean[0] + 0.01, *summary.channel_mean[1:])
    return replace(seal, arrays={"latents": replace(summary, channel_mean=means)})


@pytest.mark.parametrize(
    "edit",
    [
        mean_moved,
        lambda seal: replace(seal, identity="0" * 64),
        lambda seal: replace(seal, cached=26, rejected=4),
        lambda seal: replace(seal, plan_file=replace(seal.plan_file, sha256="0" * 64)),
    ],
)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_an_edited_seal_is_found_even_with_a_hash_of_its_own(cache, edit, level):
    write_file(cache / "seal.json", canonical_json(signed(edit(read_seal(cache)))))
    findings = verify(cache, level).findings
    assert findings
    assert {finding.file for finding in findings} <= {"seal.json", "plan.parquet"}


def test_a_record_of_a_newer_format_is_refused_by_name(cache, capsys):
    spec = cache / "zarr.json"
    spec.write_bytes(spec.read_bytes().replace(b'"format_version": 1', b'"format_version": 2'))
    assert main(["verify", str(cache)]) == 1
    assert "format version 2; this program reads version 1" in capsys.readouterr().err


def test_the_exit_code_and_the_report_say_what_was_found(cache, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["verify", str(cache)]) == 0
    assert "sound (quick): 4 shards, 27 samples" in capsys.readouterr().out
    delete(cache)
    assert main(["verify", str(cache), "--report", str(report)]) == 1
    assert "is missing" in capsys.readouterr().out
    assert json.loads(report.read_text())["findings"][0]["shard"] == 1
