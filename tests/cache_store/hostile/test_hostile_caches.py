"""Whatever a cache's files contain, a reader gets data or a named error: no crash, no hang, no large allocation.

Nothing outside the cache is opened. Records that no build writes are listed; other damage is drawn by hypothesis.
"""

import contextlib
import copy
import os
import resource
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.cache import info, metadata
from cache_store.cache.reader import open_cache
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.array import MAX_PREVIEW_FEATURES, MAX_SIDE
from cache_store.format.schema import MAX_SHARDS, BuildRecord, CommitRecord, Seal, Spec
from cache_store.format.tables import PLANNED_COLUMNS, SAMPLES_SCHEMA
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name
from tests.cache_store.signing import edited, edited_rows, resign, save, set_field
from tests.make_cache import make_cache

RECORDS = ("zarr.json", "seal.json", "build.json", "commits/000000.json", "commits/000001.json")
TABLES = ("plan/000000.parquet", "samples/000000.parquet")


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Allow 2 GiB more address space than the process has: pyarrow maps much and touches little."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    (pages,) = Path("/proc/self/statm").read_text().split()[:1]
    resource.setrlimit(resource.RLIMIT_AS, (int(pages) * resource.getpagesize() + 2 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def sound(form, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "cache"
    latents = np.random.default_rng(0).standard_normal((7, 2, 3, 2)).astype(np.float32)
    return make_cache(path, latents, rejected=(2,), samples_per_shard=4, store_format=form[0], codec=form[1])


in_zarr_alone = pytest.mark.parametrize("form", [("zarr", "none")], scope="module", ids="-".join)
"""For tests whose outcome does not depend on the form."""


def afresh(cache: Path, folder: Path) -> Path:
    """Make a copy to damage, beside a file that nothing may open."""
    (folder / "secret").write_bytes(b"secret")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return Path(shutil.copytree(cache, folder / "cache"))


@pytest.fixture
def root(sound, tmp_path) -> Path:
    return afresh(sound, tmp_path)


OPENED: set[str] = set()
sys.addaudithook(lambda event, arguments: OPENED.add(str(arguments[0])) if event == "open" else None)


def data_or_named_error(root: Path) -> None:
    """Read the cache in every way; an error of any other class, such as MemoryError, fails the test."""
    OPENED.clear()
    for use in (read_everything, info.describe, metadata.read_build, read_plan, verify, verify_deep):
        with contextlib.suppress(EncodeOnceError):
            use(root)
    assert not any(name.endswith(("secret", "passwd")) for name in OPENED)


def read_everything(root: Path) -> None:
    cache = open_cache(root)
    numbers = np.arange(len(cache))[:100]
    assert cache.samples(numbers).column_names == [*SAMPLES_SCHEMA.names, *PLANNED_COLUMNS]
    for check in (True, False):
        assert cache.read(numbers, check=check).shape == (len(numbers), *cache.arrays[0].shape)


def read_plan(root: Path) -> None:
    plan = metadata.open_plan(root)
    for part in range(plan.parts):
        plan.part(part).computed_digests()


def verify_deep(root: Path) -> str:
    return "\n".join(map(str, verify(root, "deep").findings))


OUTSIDE = ("../secret", "/etc/passwd", "latents/../../secret", "nul\0", "", ".")
ONE_FEATURE = {f"array.{name}": [1.0] for name in ("mean", "std", "minimum", "maximum")}
ONE_FEATURE |= {"array.preview": {"weight": [[1.0]] * 3, "bias": [1.0] * 3}}
COUNTS = [{"rejected": 2}, {"cached": 5, "rejected": 2}]
LATER_VERSION = {"format_version": 2, "more": "fields that only that version has"}


@in_zarr_alone
@pytest.mark.parametrize(
    ("name", "edits"),
    [
        (
            "zarr.json",
            [
                *({"shards.0.shards": shards} for shards in (10**18, MAX_SHARDS + 1, MAX_SHARDS, 0)),
                *({"shards.0.rows": rows} for rows in (10**18, 0, -5, "7")),
                {"samples_per_shard": 2**40},
                {"array": {}},
                *({"arrays": arrays} for arrays in ([], {"latents": {}, "siglip": {}})),
                *({"arrays.0.size": size} for size in ([1, 8, 8], [8, 8], [1, 0, 8], [1, 8, 2**17])),
                *({"arrays.0.shape": shape} for shape in ([2, 2**31, 1], [2, 2**16, 2**15], [0, 3, 2], [-2, 3, 2])),
                *({"arrays.0.shape": shape} for shape in ([2, 3], [2, 3, 2, 1], [4, 3, 2], [1.5] * 3)),
            ],
        ),
        ("commits/000000.json", [{"content.files.0.path": path} for path in OUTSIDE]),
        ("seal.json", [{"plan_files.0.path": path} for path in OUTSIDE]),
        ("seal.json", [*COUNTS, {"array.preview": None}, ONE_FEATURE]),
        *((name, [LATER_VERSION]) for name in RECORDS),
    ],
    ids=str,
)
def test_a_signed_record_that_no_build_writes_is_refused_by_name(root, name, edits):
    before = (root / name).read_bytes()
    for edit in edits:
        (root / name).write_bytes(before)
        with edited(root / name) as record:
            for field, value in edit.items():
                set_field(record["attributes"]["encode_once"] if name == "zarr.json" else record, field, value)
        resign(root)
        with pytest.raises(CacheError, match="version 2.*version 1" if edit is LATER_VERSION else str(root)):
            open_cache(root)  # the spec and the seal
            metadata.read_build(root)
            metadata.read_commit(root, 0)
            metadata.read_commit(root, 1)
        data_or_named_error(root)


DEEP = b'{"config": {"x": %s}, "format_version": 1, "sha256": ""}'


@in_zarr_alone
@pytest.mark.parametrize("name", RECORDS)
def test_records_that_are_no_records_give_named_errors(root, name):
    for content in (
        *(b"", b"\xff\xfe", b"null", b"7", b'"x"', b"[]", b"{}"),
        *(b"[" * 10**6, b'{"format_version":' * 10**4, b'{"a":' + b"9" * 10**4),
        *(DEEP % (b"[" * depth + b"]" * depth) for depth in (300, 900, 980, 1_000, 100_000)),
    ):
        (root / name).write_bytes(content)
        data_or_named_error(root)


@in_zarr_alone
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_shapes_give_named_errors(root, name):
    table = pq.read_table(root / name, partitioning=None)
    for other in (
        table.drop_columns(["id"]),
        table.set_column(1, "id", pa.array([1] * table.num_rows)),
        table.append_column("more", pa.array([1] * table.num_rows)),
        table.slice(0, 0),
        pa.concat_tables([table] * 3),
        pa.table({}),
        pa.table({"row": pa.nulls(4)}),
        pa.table({"row": pa.array([[[{"x": [1]}]]] * 4)}),
    ):
        pq.write_table(other, root / name)
        resign(root)
        data_or_named_error(root)
        assert verify_deep(root)


@in_zarr_alone
@pytest.mark.parametrize("column", ["id", "conversations"])
def test_a_small_table_that_holds_gigabytes_of_text_is_refused(root, column):
    """Parquet stores a repeated value once: 4,096 times 5 MB in a file of a few hundred bytes."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4_096, pa.int32()), pa.array(["x" * 5_000_000]))
    if column == "conversations":
        turns = pa.StructArray.from_arrays([texts, texts], ["from", "value"])
        texts = pa.ListArray.from_arrays(pa.array(range(4_097), pa.int32()), turns)
    table = pa.table({column: texts})
    with pq.ParquetWriter(root / TABLES[1], table.schema, store_schema=False, compression="zstd") as writer:
        writer.write_table(table)
    assert (root / TABLES[1]).stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CacheError, match=TABLES[1]):
        metadata.read_samples(root, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    data_or_named_error(root)


@in_zarr_alone
@pytest.mark.parametrize("name", [*RECORDS, *TABLES])
def test_a_file_of_more_bytes_than_it_can_have_is_refused_unread(root, name):
    """The file is sparse; a table's last bytes claim that its index fills nearly all of it."""
    size = 2**32
    os.truncate(root / name, size)
    if name in TABLES:
        with (root / name).open("r+b") as stream:
            stream.seek(size - 8)
            stream.write(struct.pack("<I4s", size - 12, b"PAR1"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data_or_named_error(root)
    assert name in verify_deep(root)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


NUMBER, DIGEST = len("-1.2345678901234567e-300,"), len('"",') + 64
RUN = len('{"array":"81x1344x768","rows":1048576,"shards":1},')
LONGEST = {
    Spec: 2 * MAX_SIDE * NUMBER + MAX_SHARDS * RUN,
    CommitRecord: 2 * MAX_SIDE * NUMBER,
    Seal: (8 * MAX_SIDE + 4 * MAX_PREVIEW_FEATURES) * NUMBER + MAX_SHARDS * RUN,
    BuildRecord: MAX_SHARDS * DIGEST,
}
"""Most bytes that the lists of each record can have."""


@pytest.mark.parametrize("record", LONGEST)
def test_the_largest_record_that_a_build_can_write_is_read(record):
    assert LONGEST[record] + 2**20 < record.max_bytes


BEYOND = "one byte beyond the file"


@pytest.mark.parametrize("form", [("webdataset", "none")], scope="module", ids="-".join)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("offset", value) for value in (-1, -(2**63), 2**63 - 1, None, BEYOND)),
        *(("length", value) for value in (0, -240, None, 23, 25, 88)),  # it is 24
        ("crc32c", None),
    ],
)
def test_samples_outside_their_file_are_refused_unread(root, column, value):
    with edited_rows(root / TABLES[1]) as rows:
        beyond = (root / shard_name(root, 0)).stat().st_size - rows[0]["length"] + 1
        rows[0][column] = beyond if value == BEYOND else value
    resign(root)
    with pytest.raises(CacheError, match=f"{TABLES[1]}|{shard_name(root, 0)}|shard 0"):
        open_cache(root).read(np.array([0]), check=False)


@pytest.mark.parametrize("form", [("zarr", "none"), ("zarr", "zstd")], scope="module", ids="-".join)
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(
    ("offset", "length"),
    [(2**63 - 1, 28), (2**64 - 2, 28), (0, 2**62), (0, 3), (0, None), (None, 28)],
)
def test_an_index_that_leads_outside_its_file_is_refused_unread(root, slot, offset, length):
    """None is the first number that does; an entry of absent rows lacks a sample."""
    path = root / shard_name(root, 0)
    data = bytearray(path.read_bytes())
    entry, end = len(data) - 4 - 4 * 16 + slot * 16, len(data)
    struct.pack_into("<2Q", data, entry, end - 27 if offset is None else offset, end + 1 if length is None else length)
    path.write_bytes(data)
    resign(root)
    with pytest.raises(CacheError, match=shard_name(root, 0)):
        open_cache(root).read(np.array([0]), check=False)
    struct.pack_into("<2Q", data, entry, 2**64 - 1, 2**64 - 1)
    path.write_bytes(data)
    resign(root)
    with pytest.raises(CacheError, match=shard_name(root, 0)):
        open_cache(root).read(np.array([0]), check=False)


JUNK = st.one_of(st.binary(max_size=9), st.sampled_from([b"\xff" * 8, bytes(8), b"\x80" * 5, b"\x7f"]))


def change_bytes(root, draw):
    """Overwrite, insert, delete or cut bytes, mostly in headers, footers and indexes."""
    path = root / draw(st.sampled_from([*RECORDS, *TABLES, shard_name(root, 0)]))
    changed = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(changed)))
        place = place if draw(st.booleans()) else max(0, len(changed) - 1 - place % 300)
        junk = draw(JUNK)
        changed[place : place + draw(st.sampled_from([0, len(junk), 1, 20]))] = junk
        if draw(st.integers(0, 9)) == 0:
            del changed[place:]
    path.write_bytes(changed)


ODD_VALUES = st.sampled_from(
    [
        *(-1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**18, -(2**63), 10**30),
        *(0.5, -0.0, 1e-320, 1e99, 1e308, -1e308, None, True, False, "", "0", "none", "zarr", "float32", "bfloat16"),
        *("../secret", "/etc/passwd", "latents/../../secret", "nul\0", "x" * 5_000, "\U0001f600", "line\nbreak\x1b[2J"),
        *([], {}, [[]], [1], [1, 2, 3], [2**31, 2**31, 1], [10**18] * 3, {"a": 1}, [1e308] * 3),
    ]
)


def change_record(root, draw):
    path = root / draw(st.sampled_from(RECORDS))
    record = msgspec.json.decode(path.read_bytes())
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from([*places(record)]))
        action, value = draw(st.integers(0, 9)), copy.deepcopy(holder[key])
        if action == 0:
            del holder[key]
        elif action > 1:
            holder[key] = copy.deepcopy(draw(ODD_VALUES))  # one that is changed in turn must not be shared
        elif isinstance(holder, list):
            holder.append(value)
        else:
            holder[draw(st.sampled_from(["../x", "more", "", "a/b"]))] = value
    save(path, record)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in [*value] if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


# Derandomised: the same cases every time. Longer runs: FUZZ_FACTOR=100 pytest tests/cache_store/hostile
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))


@pytest.mark.parametrize("change", [change_bytes, change_record])
@given(data=st.data())
@settings(
    max_examples=30 * FACTOR,
    derandomize=FACTOR == 1,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_lies_in_a_file_gives_data_or_a_named_error(sound, tmp_path, change, data):
    """Mostly with new digests over the change, so that only bounds can stop it."""
    root = afresh(sound, tmp_path)
    change(root, data.draw)
    if data.draw(st.integers(0, 3)):
        resign(root)
    data_or_named_error(root)
