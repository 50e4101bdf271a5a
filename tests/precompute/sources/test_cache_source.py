"""A cache planned from another cache's plan."""

import shutil

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from tests.precompute.conftest import Project


@pytest.fixture
def first(project: Project) -> Project:
    """With a cache that was extended, so that its rows are not in the order of ids."""
    project.has([3, 9, 17, 20, 21])
    project.build()
    project.has()
    project.build("--extend")
    return project


def second(project: Project, *flags: str, code: int = 0, of: str = "cache", **source: str) -> str:
    """Build a cache of that one's plan, of another size and another number of samples a shard."""
    return project.build(
        *flags,
        name="second",
        code=code,
        image={"height": 24, "width": 24},
        store={"samples_per_shard": 5, "format": "webdataset"},
        source={"kind": "cache", "path": str(project.folder / of), **source},
        run__max_reject_fraction=0.5,
    )


def test_a_cache_of_another_caches_plan_joins_it_by_row(first):
    second(first)
    caches = {"first": first.cache, "second": first.folder / "second"}
    joined = open_joined(caches)
    numbers = np.arange(20)
    assert len(joined) == 20
    for cache in caches.values():
        assert open_cache(cache).samples(numbers, ["row", "id"]) == joined.samples(numbers, ["row", "id"])
    assert joined.read(numbers)["second"].shape == (20, 16, 3, 3)


def test_such_a_cache_is_as_one_built_from_the_images(built):
    """Where the first was never extended; all but what remembers the source is the same."""
    built.build(name="second", source={"kind": "cache", "path": str(built.cache)})
    assert open_cache(built.folder / "second").identity == open_cache(built.cache).identity


def test_the_second_cache_grows_with_the_first(project):
    project.has(range(9))
    project.build()
    second(project)
    project.has()
    project.build("--extend")
    second(project, code=1)
    second(project, "--extend")
    assert len(open_joined({"a": project.cache, "b": project.folder / "second"})) == 20


def test_the_second_cache_is_repaired_from_the_firsts_images(first):
    second(first)
    first.cache = first.folder / "second"
    with first.same_in_the_end():
        first.lose("shards/000001.tar")
        first.repair("--shards", "1")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"of": "absent"}, "does not exist"),
        ({"of": "source"}, "holds no cache"),
        ({"of": "second"}, "is the cache itself"),
        ({"images": "images.zip"}, "the other cache remembers its images"),
    ],
)
def test_what_is_no_other_cache_is_refused_in_a_line(built, source, said):
    assert said in second(built, code=2, **source).splitlines()[-1]
    assert not (built.folder / "second").exists()


def test_a_damaged_plan_of_the_other_cache_is_refused(first):
    first.has([1, 2, 3, 5, 6])
    first.build(name="other")
    shutil.copy(first.folder / "other" / "plan.parquet", first.cache)
    assert "plan.parquet is damaged" in second(first, code=1)
