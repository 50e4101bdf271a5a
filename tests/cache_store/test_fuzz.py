"""Whatever lies in a cache's files, a reader gets data or a named error: no crash, no hang, no large allocation."""

import contextlib
import copy
import hashlib
import os
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.checksum import crc32c
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.formats import shard_format
from cache_store.info import describe
from cache_store.metadata import read_build, read_commit, read_seal, read_spec
from cache_store.plan import read_plan
from cache_store.reader import open_cache
from cache_store.record import FORMAT_VERSION, canonical_json
from cache_store.schema import MAX_SHARDS, SAMPLES_SCHEMA, CodecName, Spec, StoreFormat
from cache_store.tables import read_table
from cache_store.verify import verify
from tests.make_cache import make_cache

# Derandomised: the same cases every time. Longer runs: FUZZ_FACTOR=100 pytest tests/cache_store/test_fuzz.py
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))

MEMORY_BYTES = 2 * 2**30
"""Address space that all of it may take beyond what the process has: pyarrow maps much and touches little."""

RECORDS = ("zarr.json", "seal.json", "build.json", "commits/latents/000000.json", "commits/latents/000001.json")
TABLES = ("plan.parquet", "samples/000000.parquet")
FORMS = {"zarr": ("none", "zstd"), "webdataset": ("none",)}
SHARD = {"zarr": "latents/c/0/0/0/0", "webdataset": "shards/000000.tar"}


def fuzz(examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(
    scope="module", params=[(form, codec) for form, codecs in FORMS.items() for codec in codecs], ids="-".join
)
def sound(request, tmp_path_factory) -> Path:
    """A small cache of two shards, of each form."""
    return make_small_cache(tmp_path_factory.mktemp("sound") / "cache", *request.param)


@pytest.fixture(scope="module")
def sound_zarr(tmp_path_factory) -> Path:
    return make_small_cache(tmp_path_factory.mktemp("sound") / "cache", "zarr", "none")


def make_small_cache(path: Path, form: StoreFormat, codec: CodecName) -> Path:
    latents = np.random.default_rng(0).standard_normal((7, 2, 3, 2)).astype(np.float32)
    return make_cache(path, latents, rejected=(2,), samples_per_shard=4, store_format=form, codec=codec)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    (pages,) = Path("/proc/self/statm").read_text().split()[:1]
    resource.setrlimit(resource.RLIMIT_AS, (int(pages) * resource.getpagesize() + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


OPENED: set[str] = set()
sys.addaudithook(lambda event, arguments: OPENED.add(str(arguments[0])) if event == "open" else None)


@pytest.fixture
def damaged(sound, tmp_path) -> Callable[[], Path]:
    """The sound cache afresh, beside a file that is nobody's business."""
    return copier(sound, tmp_path)


@pytest.fixture
def damaged_zarr(sound_zarr, tmp_path) -> Callable[[], Path]:
    """For what is the same in either form."""
    return copier(sound_zarr, tmp_path)


def copier(cache: Path, folder: Path) -> Callable[[], Path]:
    (folder / "secret").write_bytes(b"secret")

    def fresh() -> Path:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return Path(shutil.copytree(cache, folder / "cache"))

    return fresh


def form_of(root: Path) -> str:
    return "zarr" if (root / "latents").exists() else "webdataset"


def data_or_named_error(root: Path) -> None:
    """Everything that reads a cache; an error of any other class fails the test, want of memory too."""
    OPENED.clear()
    for use in (read_everything, verify_everything, describe, read_build, read_plan):
        with contextlib.suppress(EncodeOnceError):
            use(root)
    assert not any(name.endswith(("secret", "passwd")) for name in OPENED)


def read_everything(root: Path) -> None:
    cache = open_cache(root)
    numbers = np.arange(len(cache))[:100]
    assert cache.samples(numbers).schema == SAMPLES_SCHEMA
    for check in (True, False):
        latents = cache.read(numbers, check=check)
        assert latents.shape == (len(numbers), *cache.spec.arrays["latents"].shape)


def verify_everything(root: Path) -> None:
    for level in ("quick", "full"):
        for finding in verify(root, level).findings:
            assert str(finding)


def test_a_sound_cache_is_read_by_all_of_it(sound):
    data_or_named_error(sound)
    assert len(open_cache(sound)) == 6
    assert verify(sound, "full").findings == ()


@given(data=st.data())
@fuzz(30)
def test_bytes_changed_in_any_file_give_data_or_a_named_error(damaged, data):
    root = damaged()
    name = data.draw(st.sampled_from([*RECORDS, *TABLES, SHARD[form_of(root)]]))
    (root / name).write_bytes(mutated_bytes(data, (root / name).read_bytes()))
    if data.draw(st.booleans()):
        resign(root)
    data_or_named_error(root)


def mutated_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Some bytes overwritten, put in, taken out or cut off; mostly where headers, footers and indexes are."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed)))
        place = place if data.draw(st.booleans()) else max(0, len(changed) - 1 - place % 300)
        junk = data.draw(
            st.one_of(st.binary(max_size=9), st.sampled_from([b"\xff" * 8, bytes(8), b"\x80" * 5, b"\x7f"]))
        )
        width = data.draw(st.sampled_from([0, len(junk), 1, 20]))
        changed[place : place + width] = junk
        if data.draw(st.integers(0, 9)) == 0:
            del changed[place:]
    return bytes(changed)


ODD_VALUES = st.sampled_from(
    [
        *(-1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**18, -(2**63), 10**30),
        *(0.5, -0.0, 1e-320, 1e99, 1e308, -1e308, None, True, False, "", "0", "none", "zarr", "float32", "bfloat16"),
        *("../secret", "/etc/passwd", "latents/../../secret", "nul\0", "x" * 5_000, "\U0001f600", "line\nbreak\x1b[2J"),
        *([], {}, [[]], [1], [1, 2, 3], [2**31, 2**31, 1], [10**18] * 3, {"a": 1}, [1e308] * 3),
    ]
)


@given(data=st.data())
@fuzz(50)
def test_records_of_odd_values_that_are_signed_give_data_or_a_named_error(damaged, data):
    """The value goes in and every digest over it is made anew, so that nothing but its own bounds can stop it."""
    root = damaged()
    name = data.draw(st.sampled_from(RECORDS))
    record = msgspec.json.decode((root / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([*places(record)]))
        change(data, record, place)
    (root / name).write_bytes(canonical_json(record))
    resign(root)
    data_or_named_error(root)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a record."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, child in value.items():
            yield from places(child, (*path, name))
    if isinstance(value, list):
        for number, child in enumerate(value[:3]):
            yield from places(child, (*path, number))


def change(data: st.DataObject, record: Any, place: tuple[Any, ...]) -> None:
    """Replace, remove, double or rename what lies at `place`."""
    holder = record
    for step in place[:-1]:
        holder = holder[step] if isinstance(holder, dict | list) and has(holder, step) else {}
    if not has(holder, place[-1]):
        return
    action = data.draw(st.integers(0, 9))
    if action == 0:
        del holder[place[-1]]
    elif action == 1 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[place[-1]]))
    elif action == 1:
        holder[data.draw(st.sampled_from(["../x", "more", "", "a/b"]))] = copy.deepcopy(holder[place[-1]])
    else:
        holder[place[-1]] = copy.deepcopy(data.draw(ODD_VALUES))  # one that is changed in turn must not be shared


def has(holder: Any, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


def resign(root: Path) -> None:
    """Make every digest, of files, records and the whole, what it would be had the cache been written like this."""
    spec_raw = resign_spec(root)
    recipe = digest({**spec_raw, "rows": 0, "plan_digest": ""}) if spec_raw else ""
    contents = []
    for name in RECORDS[3:]:
        record = load(root / name)
        if isinstance(record.get("content"), dict):
            if "recipe_digest" in record["content"] and recipe:
                record["content"]["recipe_digest"] = recipe
            files = record["content"].get("files")
            for file in files if isinstance(files, list) else []:
                refile(root, file)
            contents.append(record["content"])
        save_signed(root / name, record)
    seal = load(root / "seal.json")
    if seal:
        seal.update(spec_digest=digest(spec_raw), identity=digest(*contents))
        if isinstance(seal.get("commits"), dict):
            seal["commits"]["latents"] = [digest(content) for content in contents]
        refile(root, seal.get("plan_file"))
        save_signed(root / "seal.json", seal)
    save_signed(root / "build.json", load(root / "build.json"))


def resign_spec(root: Path) -> dict[str, Any]:
    """The group as the format would write it for this spec, if it can; the spec."""
    group = load(root / "zarr.json")
    raw = (group.get("attributes") or {}).get("encode_once") if isinstance(group.get("attributes"), dict) else None
    if not isinstance(raw, dict):
        return {}
    try:
        spec = msgspec.convert(raw, Spec)
        files = shard_format(spec).metadata(spec)
    except (msgspec.ValidationError, ValueError, OverflowError, KeyError):
        return raw
    for name, content in files.items():
        if (root / name).parent.is_dir():
            (root / name).write_bytes(content)
    return raw


def load(path: Path) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


def refile(root: Path, file: Any) -> None:
    """A file's record as it is now; of a path that leads out of the cache, as an attacker would write it."""
    if isinstance(file, dict) and isinstance(file.get("path"), str) and "\0" not in file["path"]:
        path = root / file["path"]
        if len(file["path"]) < 200 and path.is_file() and "bytes" in file and "sha256" in file:
            content = path.read_bytes()
            file.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def digest(*values: Any) -> str:
    return hashlib.sha256(b"".join(map(canonical_json, values))).hexdigest()


def save_signed(path: Path, record: dict[str, Any]) -> None:
    if record:
        path.write_bytes(canonical_json({**record, "sha256": digest({**record, "sha256": ""})}))


def test_what_is_signed_anew_is_as_sound_as_it_was(damaged):
    root = damaged()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    resign(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@given(entries=st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8), data=st.data())
@fuzz(20)
def test_a_shard_index_of_any_numbers_gives_data_or_a_named_error(damaged_zarr, entries, data):
    """Its own crc32c, the file's digest and the seal made anew."""
    root = damaged_zarr()
    path = root / SHARD["zarr"]
    content = path.read_bytes()
    near = st.integers(0, len(content) + 8)
    entries = [data.draw(near) if data.draw(st.booleans()) else entry for entry in entries]
    index = struct.pack("<8Q", *entries)
    path.write_bytes(content[: -len(index) - 4] + index + struct.pack("<I", crc32c(index)))
    resign(root)
    data_or_named_error(root)


TABLE_CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "row": st.integers(-(2**63), 2**63 - 1),
    "id": st.one_of(st.none(), st.text(max_size=3)),
    "status": st.sampled_from(["cached", "rejected", "", None, "other"]),
    "reason": st.sampled_from([None, "", ":", "missing: no", "x" * 1_000]),
    "offset": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-1, 300)),
    "length": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-1, 300)),
    "crc32c": st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    "content_sha256": st.one_of(st.none(), st.text(max_size=3)),
    "conversations": st.sampled_from([None, [], [None], [{"from": None, "value": None}]]),
}


@given(data=st.data())
@fuzz(25)
def test_samples_tables_of_odd_values_give_data_or_a_named_error(damaged, data):
    root = damaged()
    path = root / TABLES[1]
    rows = pq.read_table(path, partitioning=None).to_pylist()
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from([*TABLE_CHANGES]))
        rows[data.draw(st.integers(0, len(rows) - 1))][column] = data.draw(TABLE_CHANGES[column])
    rows = rows[: data.draw(st.sampled_from([4, 4, 4, 3, 0]))]
    pq.write_table(pa.Table.from_pylist(rows, SAMPLES_SCHEMA), path)
    resign(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_shapes_give_named_errors(damaged_zarr, name):
    root = damaged_zarr()
    table = pq.read_table(root / name, partitioning=None)
    others = [
        table.drop_columns(["id"]),
        table.set_column(1, "id", pa.array([1] * table.num_rows)),
        table.append_column("more", pa.array([1] * table.num_rows)),
        table.slice(0, 0),
        pa.concat_tables([table] * 3),
        pa.table({}),
        pa.table({"row": pa.nulls(4)}),
        pa.table({"row": pa.array([[[{"x": [1]}]]] * 4)}),
    ]
    for other in others:
        pq.write_table(other, root / name)
        resign(root)
        data_or_named_error(root)
        assert verify(root, "full").findings


@pytest.mark.parametrize("column", ["id", "conversations"])
def test_a_small_table_that_holds_gigabytes_of_text_is_refused(damaged_zarr, column):
    """Parquet keeps a value that repeats once: 5 MB, four thousand times, in a file of a few hundred bytes."""
    root = damaged_zarr()
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4_096, pa.int32()), pa.array(["x" * 5_000_000]))
    if column == "conversations":
        turns = pa.StructArray.from_arrays([texts, texts], ["from", "value"])
        texts = pa.ListArray.from_arrays(pa.array(range(4_097), pa.int32()), turns)
    table = pa.table({column: texts})
    with pq.ParquetWriter(root / TABLES[1], table.schema, store_schema=False, compression="zstd") as writer:
        writer.write_table(table)
    assert (root / TABLES[1]).stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CacheError, match="a row group holds [0-9,]+ bytes of text"):
        read_table(root / TABLES[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    data_or_named_error(root)


def test_an_empty_shard_file_gives_a_named_error(damaged):
    root = damaged()
    (root / SHARD[form_of(root)]).write_bytes(b"")
    with pytest.raises(CacheError, match="is shorter than its samples table says"):
        open_cache(root).read(np.arange(3))


HOSTILE_SPECS = {
    "10^18 rows": {"rows": 10**18},
    "a million million shards": {"rows": 10**12, "samples_per_shard": 1},
    "more shards than names": {"rows": MAX_SHARDS + 1, "samples_per_shard": 1},
    "shards of 2^40 samples": {"samples_per_shard": 2**40},
    "no rows": {"rows": 0},
    "negative rows": {"rows": -5},
    "rows that are text": {"rows": "7"},
    "no arrays": {"arrays": {}},
}


@pytest.mark.parametrize("name", HOSTILE_SPECS)
def test_a_spec_beyond_bounds_is_refused_at_once(damaged_zarr, name):
    root = damaged_zarr()
    group = load(root / "zarr.json")
    group["attributes"]["encode_once"].update(HOSTILE_SPECS[name])
    (root / "zarr.json").write_bytes(canonical_json(group))
    resign(root)
    with pytest.raises(CacheError, match="holds no valid spec"):
        read_spec(root)
    data_or_named_error(root)


def test_a_spec_of_two_arrays_is_refused_in_its_own_words(damaged_zarr):
    root = damaged_zarr()
    group = load(root / "zarr.json")
    arrays = group["attributes"]["encode_once"]["arrays"]
    arrays["siglip"] = arrays["latents"]
    (root / "zarr.json").write_bytes(canonical_json(group))
    with pytest.raises(CacheError, match="knows caches of one array"):
        read_spec(root)


@pytest.mark.parametrize(
    "shape", [[2**31, 2**31, 1], [2**16, 2**16, 2], [0, 3, 2], [-2, 3, 2], [2, 3], [2, 3, 2, 1], [1.5] * 3]
)
def test_a_shape_beyond_bounds_is_refused_at_once(damaged_zarr, shape):
    root = damaged_zarr()
    group = load(root / "zarr.json")
    group["attributes"]["encode_once"]["arrays"]["latents"]["shape"] = shape
    (root / "zarr.json").write_bytes(canonical_json(group))
    resign(root)
    with pytest.raises(CacheError, match="holds no valid spec"):
        open_cache(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "x" * 65])
def test_an_array_whose_name_is_a_path_is_refused(damaged_zarr, name):
    root = damaged_zarr()
    group = load(root / "zarr.json")
    arrays = group["attributes"]["encode_once"]["arrays"]
    arrays[name] = arrays["latents"]
    (root / "zarr.json").write_bytes(canonical_json(group))
    with pytest.raises(CacheError, match="holds no valid spec"):
        read_spec(root)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "latents/../../secret", "nul\0", "", "."])
def test_a_record_whose_file_lies_outside_the_cache_is_refused_unopened(damaged_zarr, path):
    root = damaged_zarr()
    for name, field in (("commits/latents/000000.json", "files"), ("seal.json", "plan_file")):
        record = load(root / name)
        file = record["content"]["files"][0] if field == "files" else record["plan_file"]
        file["path"] = path
        (root / name).write_bytes(canonical_json(record))
    resign(root)
    with pytest.raises(CacheError, match="is no path inside a cache"):
        read_commit(root, "latents", 0)
    with pytest.raises(CacheError, match="is no path inside a cache"):
        read_seal(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_another_format_version_are_refused_by_that(damaged_zarr, name):
    """Even where they have other fields: the version is looked at first."""
    root = damaged_zarr()
    record = load(root / name)
    versioned = record["attributes"]["encode_once"] if name == "zarr.json" else record
    versioned.update(format_version=FORMAT_VERSION + 1, more="of a later version")
    (root / name).write_bytes(canonical_json(record))
    resign(root)
    read = {"zarr.json": read_spec, "seal.json": read_seal, "build.json": read_build}
    with pytest.raises(CacheError, match="has format version 2; this program reads version 1"):
        read.get(name, lambda root: read_commit(root, "latents", int(name[-6])))(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 10**6,
        b'{"format_version":' * 10**4,
        b"null",
        b"7",
        b'"x"',
        b"[]",
        b"{}",
        b'{"a":' + b"9" * 10**4,
    ],
    ids=lambda content: repr(content[:8]),
)
def test_records_that_are_no_records_give_named_errors(damaged_zarr, name, content):
    root = damaged_zarr()
    (root / name).write_bytes(content)
    data_or_named_error(root)


def test_a_build_record_that_is_nested_deeply_gives_a_named_error(damaged_zarr):
    root = damaged_zarr()
    for depth in (300, 900, 980, 1_000, 100_000):
        deep = b"[" * depth + b"]" * depth
        (root / "build.json").write_bytes(b'{"config": {"x": ' + deep + b'}, "format_version": 1, "sha256": ""}')
        data_or_named_error(root)
