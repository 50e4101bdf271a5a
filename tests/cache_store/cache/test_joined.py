"""Several caches of one plan, read by row."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from cache_store.errors import CacheError, ConfigError, NoCacheError, StaleError
from tests.cache_store.conftest import flip, samples_of, shard_name
from tests.make_cache import make_cache

ROWS = 27
WORLD_REJECTS, TOWER_REJECTS = (0, 4, 13, 26), (4, 5, 14)
JOINED_ROWS = [row for row in range(ROWS) if row not in {*WORLD_REJECTS, *TOWER_REJECTS}]


WORLD, TOWER = samples_of((4, 6, 5), ROWS, seed=1), samples_of((3, 8), ROWS, seed=2)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Of other shapes, shard sizes, forms and rejects."""
    folder = tmp_path_factory.mktemp("joined")
    world = make_cache(folder / "world", WORLD, rejected=WORLD_REJECTS)
    options = {"samples_per_shard": 5, "store_format": "webdataset"}
    return {"world": world, "tower": make_cache(folder / "tower", TOWER, rejected=TOWER_REJECTS, **options)}


def test_joined_caches_give_the_rows_cached_in_all(caches):
    joined = open_joined(caches)
    assert len(joined) == len(JOINED_ROWS)
    everything = joined.read(np.arange(len(joined)))
    np.testing.assert_array_equal(everything["world"], WORLD[JOINED_ROWS].astype(np.float16))
    np.testing.assert_array_equal(everything["tower"], TOWER[JOINED_ROWS].astype(np.float16))


def test_joined_samples_come_in_the_order_asked_for(caches):
    joined = open_joined(caches)
    numbers = np.array([7, 0, 7, len(joined) - 1])
    rows = [JOINED_ROWS[number] for number in numbers]
    assert joined.rows(numbers).tolist() == rows
    np.testing.assert_array_equal(joined.read(numbers)["tower"], TOWER[rows].astype(np.float16))
    assert joined.samples(numbers, ["row", "id"]).to_pylist() == [{"row": r, "id": f"sample-{r:06d}"} for r in rows]


@pytest.mark.parametrize("name", ["world", "tower"])
def test_one_cache_joined_is_that_cache(caches, name):
    cache, joined = open_cache(caches[name]), open_joined({name: caches[name]})
    assert len(joined) == len(cache)
    np.testing.assert_array_equal(joined.read(np.arange(len(cache)))[name], cache.read(np.arange(len(cache))))


def test_numbers_and_columns_that_are_not_common_are_refused(caches):
    joined = open_joined(caches)
    for number in (-1, len(joined)):
        with pytest.raises(IndexError, match=rf"\[0, {len(joined)}\)"):
            joined.read(np.array([number]))
    with pytest.raises(ValueError, match="'status' is not common"):
        joined.samples(np.array([0]), ["status"])


def test_caches_of_other_plans_are_refused_with_the_table(caches, tmp_path):
    other = make_cache(tmp_path / "other", TOWER, [f"other-{row}" for row in range(ROWS)])
    with pytest.raises(StaleError, match=r"(?s)not of one plan.*plan digest.*--source.kind cache"):
        open_joined({**caches, "other": other})
    with pytest.raises(StaleError, match=r"rows +27 +9"):
        open_joined({"world": caches["world"], "fewer": make_cache(tmp_path / "fewer", TOWER[:9])})


def test_nothing_to_join_and_no_cache_are_refused(caches, tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        open_joined({})
    with pytest.raises(NoCacheError):
        open_joined({**caches, "absent": tmp_path / "absent"})


def test_the_identity_is_of_the_caches_not_of_their_names(caches):
    joined = open_joined(caches)
    assert open_joined({"b": caches["tower"], "a": caches["world"]}).identity == joined.identity
    assert open_joined({"world": caches["world"]}).identity != joined.identity


def test_a_pickled_joined_cache_reads_the_same(caches):
    joined = open_joined(caches)
    copy = pickle.loads(pickle.dumps(joined))  # noqa: S301 (our own, as a DataLoader's worker gets it)
    np.testing.assert_array_equal(copy.read(np.array([3]))["world"], joined.read(np.array([3]))["world"])


@pytest.mark.parametrize("name", ["world", "tower"])
def test_a_flipped_bit_in_either_cache_is_refused(caches, tmp_path, name):
    damaged = Path(shutil.copytree(caches[name], tmp_path / "damaged"))
    cache = open_cache(damaged)
    ((row, offset),) = (each.values() for each in cache.samples(np.array([10]), ["row", "offset"]).to_pylist())
    flip(damaged / shard_name(damaged, row // cache.spec.samples_per_shard), offset)
    with pytest.raises(CacheError, match="crc32c"):
        open_joined({**caches, name: damaged}).read(np.arange(len(JOINED_ROWS)))
