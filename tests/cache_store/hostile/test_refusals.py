"""What no build writes is refused by name, and nothing outside the cache is opened: records, tables, shard files."""

import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.files import read_samples
from cache_store.cache.metadata import read_build, read_commit, read_seal, read_spec
from cache_store.cache.reader import open_cache
from cache_store.errors import CacheError
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import MAX_SHARDS
from cache_store.verify.verify import verify
from tests.cache_store.conftest import contents, shard_name
from tests.cache_store.hostile.conftest import RECORDS, TABLES, data_or_named_error
from tests.cache_store.signing import edited, edited_rows, edited_spec, load, resign, save_signed, set_field


def test_a_sound_cache_is_read_by_all_of_it(sound):
    data_or_named_error(sound)
    assert len(open_cache(sound)) == 6
    assert verify(sound, "deep").findings == ()


def test_what_is_signed_anew_is_as_sound_as_it_was(damaged):
    before = contents(damaged)
    resign(damaged)
    assert contents(damaged) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 10**18},
        {"rows": 10**12, "samples_per_shard": 1},
        {"rows": MAX_SHARDS + 1, "samples_per_shard": 1},
        {"samples_per_shard": 2**40},
        *({"rows": rows} for rows in (0, -5, "7")),
        {"array": {}},
        {"arrays": {"latents": {}, "siglip": {}}},
        *({"array.shape": shape} for shape in ([2**31, 2**31, 1], [2**16, 2**16, 2], [0, 3, 2], [-2, 3, 2])),
        *({"array.shape": shape} for shape in ([2, 3], [2, 3, 2, 1], [1.5] * 3)),
    ],
    ids=str,
)
def test_a_spec_beyond_bounds_is_refused_at_once(root, fields):
    with edited_spec(root) as spec:
        for field, value in fields.items():
            set_field(spec, field, value)
    resign(root)
    with pytest.raises(CacheError, match="holds no valid spec"):
        open_cache(root)
    data_or_named_error(root)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "latents/../../secret", "nul\0", "", "."])
def test_a_recorded_path_outside_the_cache_is_refused_unopened(root, path):
    for name, field in (("commits/000000.json", "content.files.0.path"), ("seal.json", "plan_file.path")):
        with edited(root / name) as record:
            set_field(record, field, path)
    resign(root)
    for read in (lambda: read_commit(root, 0), lambda: read_seal(root)):
        with pytest.raises(CacheError, match="is no path inside a cache"):
            read()
    data_or_named_error(root)


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_another_format_version_are_refused_by_that(root, name):
    """Even where they have other fields: the version is looked at first."""
    with edited(root / name) as record:
        versioned = record["attributes"]["encode_once"] if name == "zarr.json" else record
        versioned.update(format_version=FORMAT_VERSION + 1, more="of a later version")
    resign(root)
    read = {"zarr.json": read_spec, "seal.json": read_seal, "build.json": read_build}
    with pytest.raises(CacheError, match="has format version 2; this program reads version 1"):
        read.get(name, lambda root: read_commit(root, int(name[-6])))(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"null", b"7", b'"x"', b"[]", b"{}"),
        *(b"[" * 10**6, b'{"format_version":' * 10**4, b'{"a":' + b"9" * 10**4),
    ],
    ids=lambda content: repr(content[:8]),
)
def test_records_that_are_no_records_give_named_errors(root, name, content):
    (root / name).write_bytes(content)
    data_or_named_error(root)


def test_a_build_record_that_is_nested_deeply_gives_a_named_error(root):
    for depth in (300, 900, 980, 1_000, 100_000):
        deep = b"[" * depth + b"]" * depth
        (root / "build.json").write_bytes(b'{"config": {"x": ' + deep + b'}, "format_version": 1, "sha256": ""}')
        data_or_named_error(root)


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_shapes_give_named_errors(root, name):
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
        assert verify(root, "deep").findings


@pytest.mark.parametrize("column", ["id", "conversations"])
def test_a_small_table_that_holds_gigabytes_of_text_is_refused(root, column):
    """Parquet keeps a value that repeats once: 5 MB, four thousand times, in a file of a few hundred bytes."""
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
        read_samples(root, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    data_or_named_error(root)


@pytest.mark.parametrize(
    "values",
    [
        *({"offset": offset} for offset in (-1, -(2**63), 2**63 - 1, None)),
        {"offset": 0, "beyond": 1},
        *({"length": length} for length in (0, -240, None)),
        {"crc32c": None},
    ],
    ids=str,
)
def test_samples_outside_their_file_are_refused_unread(damaged, values):
    change_sample(damaged, **values)
    with pytest.raises(CacheError, match=r"is shorter than its samples table says|lacks values|of other sizes"):
        open_cache(damaged).read(np.array([0]), check=False)


@pytest.mark.parametrize("longer", [-1, 1, 64])
def test_an_uncompressed_sample_of_another_size_is_refused_unread(root, longer):
    change_sample(root, longer=longer)
    with pytest.raises(CacheError, match="holds samples of other sizes"):
        open_cache(root).read(np.array([0]), check=False)


def change_sample(root, *, beyond=0, longer=0, **values):
    """Other values in row 0, as if the cache had been written like this."""
    with edited_rows(root / TABLES[1]) as rows:
        rows[0] |= values
        if beyond:
            rows[0]["offset"] = (root / shard_name(root, 0)).stat().st_size - rows[0]["length"] + beyond
        if longer:
            rows[0]["length"] += longer
    resign(root)


@pytest.mark.parametrize(
    "fields",
    [
        {"preview": None},
        {key: [1.0] for key in ("mean", "std", "minimum", "maximum")}
        | {"preview": {"weight": [[1.0]] * 3, "bias": [1.0] * 3}},
    ],
    ids=["without a preview", "of fewer features"],
)
def test_a_seal_that_sums_up_another_array_is_refused(root, fields):
    seal = load(root / "seal.json")
    seal["array"] |= fields
    save_signed(root / "seal.json", seal)
    with pytest.raises(CacheError, match="the seal sums up another array than the spec's"):
        open_cache(root)
    data_or_named_error(root)


def test_a_seal_of_more_samples_than_memory_holds_is_refused(root):
    shards, per_shard = 20_000, 2**20
    with edited_spec(root) as spec:
        spec.update(rows=shards * per_shard, samples_per_shard=per_shard)
    with edited(root / "seal.json") as seal:
        counts = [seal["cached_per_shard"][0], *[per_shard] * (shards - 1)]
        rows, cached = shards * per_shard, sum(counts)
        seal.update(planned=rows, cached=cached, rejected=rows - cached, cached_per_shard=counts)
    resign(root)
    seal = load(root / "seal.json")
    seal["commits"] += ["0" * 64] * (shards - 2)
    save_signed(root / "seal.json", seal)
    opened = open_cache(root)
    with pytest.raises(CacheError, match=r"the seal counts 20,970,\d{3},\d{3} samples, more than there is memory for"):
        opened.read(np.array([0]))
