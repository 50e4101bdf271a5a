"""Shards are runs of rows of any length: each reader finds a row wherever the cache is cut."""

import msgspec
import numpy as np
import pytest
import zarr

from cache_store import open_cache
from cache_store.cache.metadata import spec_problems
from cache_store.errors import CacheError
from cache_store.format.array import Size
from cache_store.format.schema import ShardRun, SizedArray
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.make_cache import make_cache
from tests.named import assert_names

LENGTHS = (3, 1, 8, 8, 2)
REJECTED = (3, 5, 21)


@pytest.fixture
def latents() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((sum(LENGTHS), 2, 3, 4), np.float32)


def test_rows_are_read_and_damage_is_named_in_shards_of_any_length(tmp_path, latents, store_format):
    path = make_cache(
        tmp_path / "cache", latents, rejected=REJECTED, lengths=LENGTHS, store_format=store_format, dtype="float32"
    )
    cache = open_cache(path)
    np.testing.assert_array_equal(cache.read(np.arange(len(cache))), np.delete(latents, REJECTED, axis=0))
    assert cache.rejected_rows().tolist() == [*REJECTED]
    assert [cache.spec.shard_of_row(row) for row in (0, 2, 3, 4, 21)] == [0, 0, 1, 2, 4]
    assert not verify(path, "deep").findings
    flip(path / shard_name(path, 3), 0)
    (finding,) = (each for each in verify(path, "deep").findings if each.row is not None)
    assert (finding.shard, finding.row) == (3, 12)


def test_a_zarr_array_has_a_chunk_for_each_shard(tmp_path, latents):
    """The slots behind a short shard are absent, as those of rejected rows are."""
    path = make_cache(tmp_path / "cache", latents, lengths=LENGTHS, dtype="float32")
    found = zarr.open_group(path, mode="r")["latents/32x24"][:]
    assert len(found) == 4 * 8 + 2
    places = np.concatenate([8 * shard + np.arange(length) for shard, length in enumerate(LENGTHS)])
    np.testing.assert_array_equal(found[places], latents)
    assert np.isnan(np.delete(found, places, axis=0)).all()


NAME, SIZE = "32x24", Size(1, 24, 32)
FULL, ARRAY = ShardRun(shards=1, rows=8, array=NAME), SizedArray(size=SIZE, shape=(2, 3, 4))
RUNS = {
    "longer than a full shard": ([ShardRun(shards=1, rows=9, array=NAME)], [ARRAY], "samples_per_shard 8"),
    "in no array": ([ShardRun(shards=1, rows=8, array="8x8")], [ARRAY], "array 8x8"),
    "too many": ([ShardRun(shards=10**6, rows=8, array=NAME), FULL], [ARRAY], "1,000,001"),
    "two of one size": ([FULL], [ARRAY, ARRAY], "arrays size"),
    "of nothing": ([FULL], [SizedArray(size=SIZE, shape=(2, 3))], "channel"),
}


@pytest.mark.parametrize("name", RUNS)
def test_shards_that_cannot_be_are_named(tmp_path, latents, name):
    runs, arrays, names = RUNS[name]
    spec = open_cache(make_cache(tmp_path / "cache", latents[:8])).spec
    assert_names(spec_problems(msgspec.structs.replace(spec, shards=tuple(runs), arrays=tuple(arrays))), names)


def test_a_spec_whose_shards_are_not_the_sealed_ones_is_refused(tmp_path, latents):
    path, other = (make_cache(tmp_path / str(lengths), latents, lengths=lengths) for lengths in (LENGTHS, (8, 8, 6)))
    (path / "seal.json").write_bytes((other / "seal.json").read_bytes())
    with pytest.raises(CacheError, match="seal"):
        open_cache(path)
