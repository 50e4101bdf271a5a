"""Records beyond their bounds, of other versions, or none at all are refused by name, and nothing outside is opened."""

import pytest

from cache_store.errors import CacheError
from cache_store.metadata import read_build, read_commit, read_seal, read_spec
from cache_store.reader import open_cache
from cache_store.record import FORMAT_VERSION
from cache_store.schema import MAX_SHARDS
from tests.cache_store.hostile.conftest import RECORDS, data_or_named_error
from tests.cache_store.signing import edited_spec, load, resign, save

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
def test_a_spec_beyond_bounds_is_refused_at_once(root, name):
    with edited_spec(root) as spec:
        spec.update(HOSTILE_SPECS[name])
    resign(root)
    with pytest.raises(CacheError, match="holds no valid spec"):
        read_spec(root)
    data_or_named_error(root)


def test_a_spec_of_two_arrays_is_refused_in_its_own_words(root):
    with edited_spec(root) as spec:
        spec["arrays"]["siglip"] = spec["arrays"]["latents"]
    with pytest.raises(CacheError, match="knows caches of one array"):
        read_spec(root)


@pytest.mark.parametrize(
    "shape", [[2**31, 2**31, 1], [2**16, 2**16, 2], [0, 3, 2], [-2, 3, 2], [2, 3], [2, 3, 2, 1], [1.5] * 3]
)
def test_a_shape_beyond_bounds_is_refused_at_once(root, shape):
    with edited_spec(root) as spec:
        spec["arrays"]["latents"]["shape"] = shape
    resign(root)
    with pytest.raises(CacheError, match="holds no valid spec"):
        open_cache(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "x" * 65])
def test_an_array_whose_name_is_a_path_is_refused(root, name):
    with edited_spec(root) as spec:
        spec["arrays"][name] = spec["arrays"]["latents"]
    with pytest.raises(CacheError, match="holds no valid spec"):
        read_spec(root)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "latents/../../secret", "nul\0", "", "."])
def test_a_record_whose_file_lies_outside_the_cache_is_refused_unopened(root, path):
    for name, field in (("commits/latents/000000.json", "files"), ("seal.json", "plan_file")):
        record = load(root / name)
        file = record["content"]["files"][0] if field == "files" else record["plan_file"]
        file["path"] = path
        save(root / name, record)
    resign(root)
    with pytest.raises(CacheError, match="is no path inside a cache"):
        read_commit(root, "latents", 0)
    with pytest.raises(CacheError, match="is no path inside a cache"):
        read_seal(root)
    data_or_named_error(root)


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_another_format_version_are_refused_by_that(root, name):
    """Even where they have other fields: the version is looked at first."""
    record = load(root / name)
    versioned = record["attributes"]["encode_once"] if name == "zarr.json" else record
    versioned.update(format_version=FORMAT_VERSION + 1, more="of a later version")
    save(root / name, record)
    resign(root)
    read = {"zarr.json": read_spec, "seal.json": read_seal, "build.json": read_build}
    with pytest.raises(CacheError, match="has format version 2; this program reads version 1"):
        read.get(name, lambda root: read_commit(root, "latents", int(name[-6])))(root)
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
