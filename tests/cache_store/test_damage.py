"""The damage matrix: every kind of damage to every kind of file, in every form, is found and named.

Damage inside a sample is named by its row. What an honest program cannot see is an edit of how and when a shard was
made (`run` in a commit record) that is signed anew: clocks and hosts enter no digest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from cache_store.errors import NewerFormatError
from cache_store.findings import Finding, Level
from cache_store.formats import shard_format
from cache_store.metadata import read_commit, read_seal, read_spec, write_commit
from cache_store.publish import write_file
from cache_store.record import canonical_json, signed
from cache_store.schema import Seal, commit_file, samples_file
from cache_store.shard_builder import file_record
from cache_store.verify import verify
from tests.cache_store.conftest import flip
from tests.make_cache import make_cache

ROWS, ROWS_PER_SHARD, REJECTED = 14, 6, (2, 9)
FORMS = (("zarr", "none"), ("zarr", "zstd"), ("webdataset", "none"))
FLIPS = {"zarr": 500, "webdataset": 1_000}
"""A thousand in each form; Zarr's are shared by two codecs."""

SHARD = 1
NAMES = Callable[[Path, int], str]


def small_latents(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, 4, 6, 5)).astype(np.float16).astype(np.float32)


def make_small(path: Path, form: tuple[str, str], **options: Any) -> Path:
    store_format, codec = form
    settings: dict[str, Any] = {"rejected": REJECTED, "samples_per_shard": ROWS_PER_SHARD}
    latents = options.pop("latents", small_latents())
    return make_cache(path, latents, store_format=store_format, codec=codec, **settings | options)


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def form(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def sound(form: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, the last one short, two rows rejected; nothing changes it."""
    return make_small(tmp_path_factory.mktemp("sound") / "cache", form)


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def files_of(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


def data_file(cache: Path, shard: int) -> str:
    return shard_format(read_spec(cache)).shard_file("latents", shard)


def record_file(cache: Path, shard: int) -> str:
    return commit_file("latents", shard)


def table_file(cache: Path, shard: int) -> str:
    return samples_file(shard)


def damage_found(cache: Path, level: Level = "full") -> tuple[Finding, ...]:
    """Also where the cache is refused in one line, as one of another format version is."""
    try:
        return verify(cache, level).findings
    except NewerFormatError as error:
        file, _, problem = str(error).removeprefix(f"{cache}/").partition(" ")
        return (Finding(file=file, problem=problem),)


def named(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.file for finding in findings}


def rows_named(findings: tuple[Finding, ...]) -> set[int]:
    return {finding.row for finding in findings if finding.row is not None}


def shard_of(cache: Path, name: str) -> int | None:
    shards = range(read_spec(cache).num_shards)
    return next((shard for shard in shards if name in (each(cache, shard) for each in SHARD_FILES)), None)


SHARD_FILES: tuple[NAMES, ...] = (data_file, table_file, record_file)


class Sample(NamedTuple):
    row: int
    offset: int
    end: int


def samples_in(cache: Path, shard: int) -> list[Sample]:
    rows = pq.read_table(cache / samples_file(shard), partitioning=None).to_pylist()
    return [
        Sample(row["row"], row["offset"], row["offset"] + row["length"]) for row in rows if row["status"] == "cached"
    ]


def rows_at(cache: Path, name: str, size: int) -> Iterator[tuple[range, int]]:
    """Bytes of a shard file that belong to a row, headers, checksums and index entries too."""
    shard = shard_of(cache, name)
    if shard is None or name != data_file(cache, shard):
        return
    spec = read_spec(cache)
    index = size - 4 - 16 * ROWS_PER_SHARD
    before, after = (0, 4) if spec.store_format == "zarr" else (512 + 128, 0)
    for sample in samples_in(cache, shard):
        yield range(sample.offset - before, sample.end + after), sample.row
        if spec.store_format == "zarr":
            entry = index + 16 * (sample.row - spec.shard_rows(shard).start)
            yield range(entry, entry + 16), sample.row


def test_a_sound_cache_has_no_findings(sound):
    assert not verify(sound, "full").findings
    assert not verify(sound, "quick").findings


def test_any_flipped_bit_is_named_by_its_file_and_row_and_nothing_else_is_blamed(cache, form):
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


def cut_by_one(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def extend_by_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def extend_by_zeros(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(10_240))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SIZES = (cut_by_one, cut_in_half, empty, extend_by_a_byte, extend_by_zeros, Path.unlink, replace_by_a_folder)


@pytest.mark.parametrize("damage", SIZES)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_file_of_another_size_is_named_whatever_it_is(cache, damage, level):
    for name in files_of(cache):
        data = (cache / name).read_bytes()
        damage(cache / name)
        assert name in named(damage_found(cache, level)), name
        if (cache / name).is_dir():
            (cache / name).rmdir()
        (cache / name).write_bytes(data)


def test_a_cut_shard_names_the_rows_that_it_lost(cache):
    name, samples = data_file(cache, SHARD), samples_in(cache, SHARD)
    (cache / name).write_bytes((cache / name).read_bytes()[: samples[2].end - 1])
    assert {sample.row for sample in samples[2:]} <= rows_named(verify(cache, "full").findings)


def swap(first: Path, second: Path) -> None:
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


@pytest.mark.parametrize("kind", SHARD_FILES)
def test_swapped_files_of_two_shards_are_both_named(cache, kind):
    names = [kind(cache, shard) for shard in (0, 1)]
    swap(*(cache / name for name in names))
    assert set(names) <= named(verify(cache, "full").findings)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_two_wholly_swapped_shards_are_named_by_their_records(cache, level):
    """Data, samples and record together: every crc and hash inside is right."""
    for kind in SHARD_FILES:
        swap(*(cache / kind(cache, shard) for shard in (0, 1)))
    findings = verify(cache, level).findings
    assert {record_file(cache, shard) for shard in (0, 1)} <= named(findings)
    assert {finding.shard for finding in findings} == {0, 1}


def equal_samples(cache: Path) -> tuple[Sample, Sample]:
    """Two samples of one shard of equal length, so that one fits in the other's place."""
    samples = samples_in(cache, SHARD)
    first = samples[0]
    return first, next(each for each in samples[1:] if each.end - each.offset == first.end - first.offset)


def swap_samples(cache: Path, *samples: Sample) -> None:
    """In the shard file, each with the crc32c behind it where the form has one there."""
    path = cache / data_file(cache, SHARD)
    data, extra = bytearray(path.read_bytes()), 4 if read_spec(cache).store_format == "zarr" else 0
    first, second = (data[sample.offset : sample.end + extra] for sample in samples)
    data[samples[0].offset : samples[0].end + extra] = second
    data[samples[1].offset : samples[1].end + extra] = first
    path.write_bytes(data)


def swap_columns(cache: Path, columns: tuple[str, ...], *samples: Sample) -> None:
    """Two rows' values in the samples table."""
    path, first_row = cache / samples_file(SHARD), read_spec(cache).shard_rows(SHARD).start
    table = pq.read_table(path, partitioning=None)
    first, second = (sample.row - first_row for sample in samples)
    for name in columns:
        values = table[name].to_pylist()
        values[first], values[second] = values[second], values[first]
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    pq.write_table(table, path, compression="zstd")


def test_two_swapped_rows_are_named(cache):
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    assert {sample.row for sample in samples} <= rows_named(verify(cache, "full").findings)


def test_two_rows_swapped_in_the_samples_table_alone_are_named(cache):
    samples = equal_samples(cache)
    swap_columns(cache, ("offset", "length", "crc32c"), *samples)
    findings = verify(cache, "full").findings
    assert {sample.row for sample in samples} <= rows_named(findings)
    assert samples_file(SHARD) in named(findings)


def test_rows_swapped_in_shard_and_samples_table_are_named_by_both_files(cache):
    """Every crc fits its bytes then, so that only the hashes of the two files are left to tell."""
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    swap_columns(cache, ("crc32c",), *samples)
    assert {data_file(cache, SHARD), samples_file(SHARD)} <= named(verify(cache, "full").findings)


def test_swapped_rows_are_found_even_under_a_record_made_for_them(cache):
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    swap_columns(cache, ("crc32c",), *samples)
    fit_record(cache)
    for level in ("quick", "full"):
        assert named(verify(cache, level).findings) == {record_file(cache, SHARD)}


def fit_record(cache: Path) -> None:
    """Make the record one of the files as they are."""
    record = read_commit(cache, "latents", SHARD)
    assert record is not None
    files = tuple(file_record(cache, cache / file.path) for file in record.content.files)
    write_commit(cache, signed(replace(record, content=replace(record.content, files=files))))


def test_a_damaged_plan_of_an_unsealed_cache_blames_no_shard(cache):
    """No hash of it is known then, and no row of a shard is wrong for it."""
    (cache / "seal.json").unlink()
    data, found = (cache / "plan.parquet").read_bytes(), 0
    for position in range(0, len(data), 7):
        flip(cache / "plan.parquet", position)
        blamed = named(verify(cache, "full").findings) - {"seal.json"}
        (cache / "plan.parquet").write_bytes(data)
        assert blamed <= {"plan.parquet"}, f"byte {position}: {blamed}"
        found += bool(blamed)
    assert found > len(data) / 7 / 2


def test_rows_of_a_damaged_samples_table_are_its_own_fault(cache):
    """The shard file has its hash; what the table says of it is what is wrong."""
    sample = samples_in(cache, SHARD)[0]
    first_row = read_spec(cache).shard_rows(SHARD).start
    table = pq.read_table(cache / samples_file(SHARD), partitioning=None)
    crcs = table["crc32c"].to_pylist()
    crcs[sample.row - first_row] ^= 1
    table = table.set_column(11, table.schema.field("crc32c"), pa.array(crcs, pa.uint32()))
    pq.write_table(table, cache / samples_file(SHARD), compression="zstd")
    findings = verify(cache, "full").findings
    assert named(findings) == {samples_file(SHARD)}
    assert rows_named(findings) == {sample.row}


def test_a_shard_file_and_a_table_that_differ_are_found_though_each_has_the_hash_of_its_record(cache):
    samples = equal_samples(cache)
    swap_samples(cache, *samples)
    fit_record(cache)
    (cache / "seal.json").unlink()
    findings = verify(cache, "full").findings
    assert named(findings) == {data_file(cache, SHARD), "seal.json"}
    assert rows_named(findings) == {sample.row for sample in samples}


@pytest.mark.parametrize("lose", [Path.unlink, cut_in_half])
def test_a_flipped_latent_beside_a_lost_record_is_named_by_its_row(cache, lose):
    sample = samples_in(cache, SHARD)[1]
    flip(cache / data_file(cache, SHARD), sample.offset)
    lose(cache / record_file(cache, SHARD))
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), data_file(cache, SHARD)}
    assert rows_named(findings) == {sample.row}


def test_a_record_of_other_files_does_not_keep_its_shard_from_being_looked_at(cache):
    sample = samples_in(cache, SHARD)[1]
    flip(cache / data_file(cache, SHARD), sample.offset)
    shutil.copy(cache / record_file(cache, 0), cache / record_file(cache, SHARD))
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), data_file(cache, SHARD)}
    assert rows_named(findings) == {sample.row}


def test_what_can_not_be_checked_without_record_and_table_is_said(cache):
    flip(cache / data_file(cache, SHARD), samples_in(cache, SHARD)[1].offset)
    for name in (record_file(cache, SHARD), table_file(cache, SHARD)):
        cut_in_half(cache / name)
    findings = verify(cache, "full").findings
    assert named(findings) == {record_file(cache, SHARD), table_file(cache, SHARD)}
    assert f"{data_file(cache, SHARD)} was not looked at" in "".join(finding.problem for finding in findings)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_files_that_are_lost_with_their_record_are_named(cache, level):
    lost = {kind(cache, SHARD) for kind in SHARD_FILES}
    for name in lost:
        (cache / name).unlink()
    assert named(verify(cache, level).findings) == lost


@pytest.mark.parametrize("column", ["id", "uri"])
def test_swapped_texts_name_their_rows(cache, column):
    samples = equal_samples(cache)
    swap_columns(cache, (column,), *samples)
    assert {sample.row for sample in samples} <= rows_named(verify(cache, "full").findings)


def test_a_shard_of_one_row_names_that_row(form, tmp_path):
    cache = make_small(tmp_path / "cache", form, samples_per_shard=1)
    path = cache / samples_file(SHARD)
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.set_column(1, table.schema.field("id"), pa.array(["other"])), path, compression="zstd")
    assert rows_named(verify(cache, "full").findings) == {SHARD}


def bump(values: tuple[float, ...]) -> tuple[float, ...]:
    return (values[0] + 1e-3, *values[1:])


RECORD_EDITS: dict[str, dict[str, Any]] = {
    "array": {"array": "features"},
    "shard": {"shard": 0},
    "recipe digest": {"recipe_digest": "0" * 64},
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
@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("resign", [True, False])
def test_an_edited_record_is_named_with_and_without_a_hash_of_its_own(cache, edit, level, resign):
    name = record_file(cache, SHARD)
    record = json.loads((cache / name).read_bytes())
    for field, value in RECORD_EDITS[edit].items():
        set_field(record["content"], field, value)
    if resign:
        record["sha256"] = hashlib.sha256(canonical_json(record | {"sha256": ""})).hexdigest()
    (cache / name).write_bytes(canonical_json(record))
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
    "records": lambda seal: replace(seal, commits={"latents": seal.commits["latents"][::-1]}),
    "no records": lambda seal: replace(seal, commits={}),
    "plan": lambda seal: replace(seal, plan_file=replace(seal.plan_file, sha256="0" * 64)),
    "plan's path": lambda seal: replace(seal, plan_file=replace(seal.plan_file, path="build.json")),
    "mean": lambda seal: edited_summary(seal, channel_mean=bump(seal.arrays["latents"].channel_mean)),
    "maximum": lambda seal: edited_summary(seal, maximum=bump(seal.arrays["latents"].maximum)),
    "preview": lambda seal: edited_summary(seal, rgb_bias=bump(seal.arrays["latents"].rgb_bias)),
    "bytes": lambda seal: edited_summary(seal, bytes=1),
    "arrays": lambda seal: replace(seal, arrays={}),
}


def edited_summary(seal: Seal, **fields: Any) -> Seal:
    return replace(seal, arrays={"latents": replace(seal.arrays["latents"], **fields)})


@pytest.mark.parametrize("edit", SEAL_EDITS)
@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("resign", [True, False])
def test_an_edited_seal_is_named_with_and_without_a_hash_of_its_own(cache, edit, level, resign):
    edited = SEAL_EDITS[edit](read_seal(cache))
    write_file(cache / "seal.json", canonical_json(signed(edited) if resign else edited))
    findings = verify(cache, level).findings
    assert "seal.json" in named(findings)
    assert {finding.shard for finding in findings} == {None}


@pytest.mark.parametrize("level", ["quick", "full"])
def test_what_a_dead_build_left_is_named(cache, level):
    folders = {"", *(f"{name.rpartition('/')[0]}/" for name in files_of(cache) if "/" in name)}
    left = {f"{folder}.000001.1.partial" for folder in folders}
    for name in left:
        (cache / name).write_bytes(b"half")
    assert named(verify(cache, level).findings) == left


OTHERS: dict[str, dict[str, Any]] = {
    "other samples": {"ids": [f"other-{row}" for row in range(ROWS)]},
    "other latents": {"latents": small_latents(seed=1)},
}


@pytest.mark.parametrize("options", OTHERS)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_shard_of_another_cache_of_the_same_shape_is_named(cache, form, tmp_path, options, level):
    other = make_small(tmp_path / "other", form, **OTHERS[options])
    for kind in SHARD_FILES:
        shutil.copy(other / kind(cache, SHARD), cache / kind(cache, SHARD))
    findings = verify(cache, level).findings
    assert record_file(cache, SHARD) in named(findings)
    assert {finding.shard for finding in findings} == {SHARD}


@pytest.mark.parametrize("kind", [data_file, table_file])
def test_a_file_of_another_cache_of_the_same_shape_is_named(cache, form, tmp_path, kind):
    other = make_small(tmp_path / "other", form, ids=[f"other-{row}" for row in range(ROWS)], latents=small_latents(1))
    name = kind(cache, SHARD)
    shutil.copy(other / name, cache / name)
    findings = verify(cache, "full").findings
    assert name in named(findings)
    assert {finding.shard for finding in findings} == {SHARD}


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_missing_folder_is_named_by_every_file_that_was_in_it(cache, level):
    for folder in sorted({name.partition("/")[0] for name in files_of(cache) if "/" in name}):
        lost = {name for name in files_of(cache) if name.startswith(f"{folder}/")}
        (cache / folder).rename(cache.parent / "away")
        assert lost <= named(verify(cache, level).findings)
        (cache.parent / "away").rename(cache / folder)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_what_does_not_belong_is_named(cache, level):
    folder = data_file(cache, SHARD).partition("/")[0]
    strangers = {f"{folder}/extra", "samples/000099.parquet", "commits/latents/notes.txt", "commits/features"}
    for name in strangers:
        if "." in name:
            (cache / name).write_bytes(b"?")
        else:
            (cache / name).mkdir()
    assert named(verify(cache, level).findings) == strangers


def folder_in_the_way(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def pipe_in_the_way(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("put", [folder_in_the_way, pipe_in_the_way, link_to_itself])
def test_what_is_no_file_is_named_and_never_waited_on(cache, put):
    for name in files_of(cache):
        kept = (cache / name).read_bytes()
        put(cache / name)
        found = verify(cache, "full")
        assert name in named(found.findings)
        assert next(found.next_steps("report.json")).startswith(f"move {cache}/{name} away")
        (cache / name).rename(cache.parent / f"moved-{name.replace('/', '-')}")
        (cache / name).write_bytes(kept)
    assert not verify(cache, "full").findings


def test_a_file_in_place_of_a_folder_is_to_be_deleted_before_a_repair(cache):
    shutil.rmtree(cache / "commits/latents")
    (cache / "commits/latents").write_bytes(b"?")
    first, *others = verify(cache, "full").next_steps("report.json")
    assert first.startswith(f"delete {cache}/commits/latents")
    assert others[0].startswith("precompute repair")


def test_a_damaged_build_record_is_mended_by_a_build_before_any_repair(cache):
    (cache / "build.json").write_bytes(b"{")
    (cache / "samples/000001.parquet").unlink()
    first, second = verify(cache, "full").next_steps("report.json")
    assert first.startswith(
        "rerun the `precompute build` or `cache-store convert` that made the cache: it writes build.json again"
    )
    assert second.startswith("precompute repair")
