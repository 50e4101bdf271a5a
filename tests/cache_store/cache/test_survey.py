"""A commit record holds the recipe whole: with the plan it is the spec."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from cache_store.cache.metadata import read_seal, read_spec
from cache_store.cache.survey import held_recipe, survey
from cache_store.errors import StaleError
from cache_store.format.plan import plan_digest
from cache_store.format.schema import StoreDtype
from tests.make_cache import make_cache


def small_cache(path: Path, dtype: StoreDtype = "float16") -> Path:
    latents = np.random.default_rng(0).standard_normal((10, 2, 3, 4), np.float32)
    return make_cache(path, latents, rejected=[3], samples_per_shard=4, dtype=dtype)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return small_cache(tmp_path / "cache")


@pytest.mark.parametrize("shard", range(3))
def test_any_sound_record_and_the_plan_are_the_spec(cache, shard):
    spec = read_spec(cache)
    (cache / "zarr.json").unlink()
    (cache / "seal.json").unlink()
    for other in {0, 1, 2} - {shard}:
        (cache / f"commits/{other:06d}.json").write_bytes(b"?")
    found = survey(cache)
    recipe, plan = held_recipe(found), found.plan.value.table
    assert recipe.spec(plan.num_rows, plan_digest([plan])) == spec


def test_the_seal_holds_the_recipe_too(cache):
    assert read_seal(cache).recipe == held_recipe(survey(cache))


def test_records_of_two_recipes_are_refused_and_both_named(cache, tmp_path):
    other = small_cache(tmp_path / "other", "float32")
    shutil.copyfile(other / "commits/000001.json", cache / "commits/000001.json")
    with pytest.raises(StaleError, match="holds shards of two recipes") as raised:
        held_recipe(survey(cache))
    table = [" ".join(line.split()) for line in str(raised.value).splitlines()]
    assert "field commits/000000.json commits/000001.json" in table
    assert "array.dtype float16 float32" in table


def test_without_a_sound_record_the_seal_says_the_recipe(cache):
    recipe = read_spec(cache).recipe
    for path in (cache / "zarr.json", *(cache / "commits").iterdir()):
        path.write_bytes(b"?")
    assert held_recipe(survey(cache)) == recipe
    (cache / "seal.json").unlink()
    assert held_recipe(survey(cache)) is None
