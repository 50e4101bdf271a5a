"""Caches to damage, kinds of damage, and the files and rows that verification must name."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from cache_store.cache.commit import write_rows
from cache_store.cache.metadata import read_commit, read_spec, read_sums
from cache_store.format.codec import crc32c
from cache_store.format.layout import commit_file, samples_file
from cache_store.format.schema import StoreFormat
from cache_store.storage.local import LocalStore
from cache_store.verify.findings import Finding
from cache_store.verify.scope import Level
from tests.cache_store import signing
from tests.cache_store.conftest import contents, flip, samples_of, shard_name, swap
from tests.make_cache import make_cache, seal_cache

ROWS, ROWS_PER_SHARD, SHARDS = 13, 6, range(3)
SHARD, SHARD_1 = ("data", "table", "record"), ("data 1", "table 1", "record 1")
"""The kinds of a shard's files."""
LEVELS: tuple[Level, ...] = ("quick", "full", "deep")


def make_sound(folder: Path, store_format: StoreFormat, codec: str) -> Path:
    """Make a cache of three shards, the last with one row, and another of the same shape beside it."""
    options: dict[str, Any] = {"samples_per_shard": ROWS_PER_SHARD, "store_format": store_format, "codec": codec}
    for name, seed in (("cache", 7), ("other", 1)):
        ids = [f"{name}-{row}" for row in range(ROWS)]
        make_cache(folder / name, samples_of((4, 6, 5), ROWS, seed), ids, rejected=(2, 8), **options)
    return folder / "cache"


def shard_files(cache: Path) -> dict[str, str]:
    """Return the names of the shards' files by kind and shard, such as `data 1`."""
    names = ((shard_name(cache, shard), samples_file(shard), commit_file(shard)) for shard in SHARDS)
    return {f"{what} {shard}": name for shard, each in enumerate(names) for what, name in zip(SHARD, each, strict=True)}


def files_in(cache: Path) -> dict[str, int | None]:
    """Return the shard of every file; None for files of the whole cache."""
    shards = {name: int(what[-1]) for what, name in shard_files(cache).items()}
    return {name: shards.get(name) for name in sorted(contents(cache))}


def named(findings: Sequence[Finding]) -> dict[str, set[int]]:
    rows: dict[str, set[int]] = {finding.file: set() for finding in findings}
    for finding in findings:
        rows[finding.file] |= set() if finding.row is None else {finding.row}
    return rows


def samples_in(cache: Path, shard: int) -> list[dict[str, Any]]:
    rows = pq.read_table(cache / samples_file(shard), partitioning=None).to_pylist()
    return [row for row in rows if row["status"] == "cached"]


def rows_at(cache: Path, shard: int) -> list[tuple[range, int]]:
    """List the bytes of a shard file that belong to each row: headers, checksums, index entries, a tar's JSON."""
    data, samples = (cache / shard_name(cache, shard)).read_bytes(), samples_in(cache, shard)
    if not (cache / "latents").is_dir():
        starts = [each["offset"] - 512 - 128 for each in samples]
        ends = [*starts[1:], data.rindex(b"}") + 1]
        return [(range(start, end), each["row"]) for each, start, end in zip(samples, starts, ends, strict=True)]
    index = len(data) - 4 - 16 * ROWS_PER_SHARD
    entries = [(index + 16 * (each["row"] % ROWS_PER_SHARD), each["row"]) for each in samples]
    spans = [(range(each["offset"], each["offset"] + each["length"] + 4), each["row"]) for each in samples]
    return spans + [(range(entry, entry + 16), row) for entry, row in entries]


# What is done to shard 1, of rows [6, 12), and what is named.

At = Callable[[str], Path]
"""Returns a file's path, by its name or by kind and shard."""
Damage = Callable[[At], object]
Named = dict[str, set[int]]


class Scene(NamedTuple):
    damage: Sequence[Damage]
    deep: Named
    """All files that level deep names, with their rows."""
    full: Named | None = None
    """Named at level full; None: the same as at level deep."""
    quick: Named | None = None
    """Named at level quick; None: the files whose sizes are wrong."""
    says: str = ""


def lose(*names: str) -> Damage:
    return lambda at: [at(name).unlink() for name in names]


def cut_in_half(*names: str) -> Damage:
    return lambda at: [os.truncate(at(name), at(name).stat().st_size // 2) for name in names]


def swap_shards(*kinds: str) -> Damage:
    return lambda at: [swap(at(f"{kind} 0"), at(f"{kind} 1")) for kind in kinds]


def copy_from_other(*names: str) -> Damage:
    return lambda at: [shutil.copy(at("../other") / at(name).relative_to(at(".")), at(name)) for name in names]


def span_of(at: At, row: int) -> slice:
    """Return the span of a sample in shard 1, with the crc32c that follows it in the Zarr form."""
    sample = next(each for each in samples_in(at("."), 1) if each["row"] == row)
    return slice(sample["offset"], sample["offset"] + sample["length"] + (4 if at("latents").is_dir() else 0))


def flip_row_7(at: At) -> None:
    flip(at("data 1"), span_of(at, 7).start)


def swap_rows(at: At) -> None:
    data, first, second = bytearray(at("data 1").read_bytes()), span_of(at, 6), span_of(at, 7)
    data[first], data[second] = data[second], data[first]
    at("data 1").write_bytes(data)


def edit_table(name: str, edit: Callable[[list[dict[str, Any]]], object]) -> Damage:
    def damage(at: At) -> None:
        with signing.edited_rows(at(name)) as rows:
            edit(rows)

    return damage


def swap_columns(*names: str) -> Damage:

    def swap_in(rows: list[dict[str, Any]]) -> None:
        for name in names:
            rows[0][name], rows[1][name] = rows[1][name], rows[0][name]

    return edit_table("table 1", swap_in)


def fit_record(at: At) -> None:
    record = signing.load(at("record 1"))
    for file in record["content"]["files"]:
        signing.refile(at("."), file)
    signing.save_signed(at("record 1"), record)


def put_nan_into_row_7(at: At) -> None:
    """Write the shard as a faulty encoder would: with correct checksums and hashes."""
    data, span = bytearray(at("data 1").read_bytes()), span_of(at, 7)
    end = span.stop - 4 if at("latents").is_dir() else span.stop
    data[end - 2 : end] = np.float16(np.nan).tobytes()  # blosc has only copied such short samples
    checksum = crc32c(bytes(data[span.start : end]))
    data[end : span.stop] = checksum.to_bytes(4, "little")[: span.stop - end]
    at("data 1").write_bytes(data)
    edit_table("table 1", lambda rows: rows[1].update(crc32c=checksum))(at)
    signing.resign(at("."))


def rewrite_sums(at: At, kind: int) -> bytes:
    """Change a sum, square, minimum or maximum in the samples table; return the new sums."""
    store, table = LocalStore(at(".")), pq.read_table(at("table 1"), partitioning=None)
    sums = read_sums(store, read_spec(at(".")), read_commit(store, 1).content)
    (totals := sums.totals.copy())[kind, 0] += 1e-5
    data = sums._replace(totals=totals).data
    with at("table 1").open("wb") as stream:
        write_rows(stream, table, data)
    return data


def change_unnamed_sums(at: At) -> None:
    """Change a sum, and sign the record and the seal, but the record's digest of the sums stays as it was."""
    rewrite_sums(at, 0)
    signing.resign(at("."))


def edit_sums(kind: int) -> Damage:
    """Change a sum, square, minimum or maximum, then sign the record and seal the cache."""

    def damage(at: At) -> None:
        spec, record, data = read_spec(at(".")), signing.load(at("record 1")), rewrite_sums(at, kind)
        written = at("table 1").read_bytes()
        record["content"]["sums"] = hashlib.sha256(data).hexdigest()
        record["content"]["files"][1] |= {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
        signing.save_signed(at("record 1"), record)
        seal_cache(at("."), spec)

    return damage


def edit_spec(at: At) -> None:
    with signing.edited_spec(at(".")) as spec:
        spec["array"]["image"]["resample"] = "other"


NO_SEAL = lose("seal.json")
NOTHING: Named = {}
DATA, TABLE, RECORD = ({f"{kind} 1": set[int]()} for kind in ("data", "table", "record"))
SEAL, SPEC, PLAN = ({name: set[int]()} for name in ("seal.json", "zarr.json", "plan/000000.parquet"))
ROW_7, ROWS_6_7, CACHED = ({"data 1": rows} for rows in ({7}, {6, 7}, {6, 7, 9, 10, 11}))
SCENES = {
    "data of two shards swapped": Scene([swap_shards("data")], {"data 0": {0, 1, 3, 4, 5}} | CACHED, quick=NOTHING),
    "a shard lost with its record": Scene([lose(*SHARD_1)], DATA | TABLE | RECORD, quick=DATA | TABLE | RECORD),
    "all tables lost": Scene(
        [lambda at: shutil.rmtree(at("table 0").parent)], {f"table {shard}": set() for shard in SHARDS}
    ),
    "another cache's shard": Scene([copy_from_other(*SHARD_1)], RECORD, quick=RECORD),
    "another cache's data": Scene([copy_from_other("data 1")], CACHED),
    "another cache's table": Scene([copy_from_other("table 1")], {"table 1": CACHED["data 1"]}),
    "another cache's plan, no seal": Scene([copy_from_other("plan/000000.parquet"), NO_SEAL], PLAN | SEAL),
    "another spec than the records have": Scene([edit_spec, NO_SEAL], SPEC, quick=SPEC),
    "a shard cut in row 9": Scene(
        [lambda at: os.truncate(at("data 1"), span_of(at, 9).stop - 5)], {"data 1": {9, 10, 11}}, quick=DATA
    ),
    "a flipped bit, half a record": Scene([flip_row_7, cut_in_half("record 1")], RECORD, quick=RECORD),
    "two rows swapped in the shard": Scene([swap_rows], ROWS_6_7, quick=NOTHING),
    "their crc32c swapped as well": Scene([swap_rows, swap_columns("crc32c")], DATA | TABLE),
    "a record made for swapped rows, no seal": Scene(
        [swap_rows, fit_record, NO_SEAL], ROWS_6_7 | SEAL, full=SEAL, quick=SEAL
    ),
    "two ids swapped in the table": Scene([swap_columns("id")], {"table 1": {6, 7}}),
    "a cached row said to be rejected": Scene(
        [edit_table("table 1", lambda rows: rows[0].update(status="rejected"))], {"table 1": {6}}
    ),
    "a nan under right hashes": Scene([put_nan_into_row_7], ROW_7, NOTHING, NOTHING, "holds 1 non-finite values"),
    "sums that the record does not name": Scene([change_unnamed_sums], TABLE, quick=NOTHING, says="does not name"),
    **{
        f"another {field} under right hashes": Scene([edit_sums(kind)], TABLE, NOTHING, NOTHING, "do not follow from")
        for kind, field in ((0, "sum"), (3, "maximum"))
    },
}


def harm(cache: Path, name: str) -> None:
    names = shard_files(cache)
    for damage in SCENES[name].damage:
        damage(lambda name: cache / names.get(name, name))
