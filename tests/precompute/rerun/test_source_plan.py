"""The plan of a source larger than memory is made, compared and reordered a few shards at a time."""

import random
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.metadata import write_plan
from cache_store.errors import CacheError, SourceError
from cache_store.format.schema import MAX_SHARDS, Recipe
from cache_store.format.tables import MAX_PLAN_FOOTER_BYTES
from cache_store.storage.local import LocalStore
from precompute.rerun.arrange import OneSize
from precompute.rerun.match_rows import ROWS_HELD, compare_plans, reorder_by_ids
from precompute.rerun.rows import Rows, number_rows, rows_in_scratch
from precompute.rerun.source_plan import make_plan, refuse_duplicates, sorted_by_id
from precompute.sources.listing import Samples
from tests.make_cache import caption, make_array, make_encoder, sized_array

PER_SHARD = 64
SIZED = sized_array((1, 1, 1), None)
ARRAY = make_array((1, 1, 1), "float16", "none", make_encoder(4, [0.0], [1.0]))
RECIPE = Recipe(format_version=1, store_format="zarr", samples_per_shard=PER_SHARD, array=ARRAY)


class Sample(dict[str, Any]):
    """A sample that is counted while anything holds it."""

    __hash__ = object.__hash__


def sample(number: int) -> Sample:
    name = f"sample-{number:06d}"
    return Sample(id=name, uri=f"{name}.png", conversations=caption(f"this is {name}"), fingerprint="0:0")


def plan_of(numbers: Iterable[int], per_shard: int = PER_SHARD) -> Rows:
    return make_plan(Samples(map(sample, numbers), in_rows=True), per_shard)


def held_at_most(count: int) -> tuple[int, int]:
    """Return the most samples, and the most of Arrow's bytes, held at a time to plan this many."""
    alive, most, before = WeakSet[Sample](), [0, 0], pa.total_allocated_bytes()

    def counted() -> Iterator[Sample]:
        for number in range(count):
            alive.add(each := sample(number))
            most[:] = max(most[0], len(alive)), max(most[1], pa.total_allocated_bytes() - before)
            yield each

    plan = make_plan(Samples(counted(), in_rows=True), PER_SHARD)
    assert len(plan) == plan.plan.num_rows == count
    return most[0], most[1]


def test_ten_times_as_many_samples_take_no_more_memory():
    """Only the ids' hashes and the index of row groups grow."""
    few, many = held_at_most(20 * PER_SHARD), held_at_most(200 * PER_SHARD)
    assert many[0] == few[0] <= 2 * PER_SHARD
    assert many[1] < 1.5 * few[1] + 2**20


def test_a_plan_takes_a_kilobyte_of_footer_a_shard_however_long_its_captions(tmp_path, monkeypatch):
    """The list of samples may be as large as a plan; one that no reader would take is not published."""
    captioned = (sample(number) | {"conversations": caption(chr(97 + number) * 3_000)} for number in range(20))
    rows = OneSize(SIZED, 1).arrange_new(make_plan(Samples(captioned, in_rows=True), 1))
    spec, store = rows.spec(RECIPE), LocalStore(tmp_path)
    write_plan(store, spec, rows.shards())
    footer: int = pq.read_metadata(tmp_path / "plan.parquet").serialized_size
    assert footer < 20 * MAX_PLAN_FOOTER_BYTES / MAX_SHARDS
    for place in ("cache_store.cache.metadata", "precompute.rerun.rows"):
        monkeypatch.setattr(f"{place}.MAX_PLAN_FOOTER_BYTES", footer // 2)
    (tmp_path / "plan.parquet").unlink()
    with pytest.raises(CacheError, match=r"plan\.parquet.*footer"):
        write_plan(store, spec, rows.shards())
    assert not any(tmp_path.iterdir())
    with pytest.raises(CacheError, match="the list of samples"):
        rows_in_scratch(rows.shards())


def test_ids_of_one_hash_are_no_duplicates():
    plan = plan_of(range(10), per_shard=4)
    refuse_duplicates(plan, np.zeros(10, np.int64), "")
    with pytest.raises(SourceError, match=r"\b2\b.*sample-000003.*sample-000009"):
        plan_of([*range(10), 9, 3], per_shard=4)


@pytest.mark.parametrize("count", [1, 32, 33, 100])
def test_samples_in_no_order_are_sorted_a_run_at_a_time(count):
    """The result is the one of a sort by id in memory."""
    numbers = random.Random(0).sample(range(count), count)
    shards = sorted_by_id(map(sample, numbers), 20, run_rows=32, page_rows=8)
    found = rows_in_scratch(number_rows(shards))
    assert found.digests == (expected := plan_of(range(count), per_shard=20)).digests
    assert pa.concat_tables(found.shards()) == pa.concat_tables(expected.shards())


@pytest.mark.parametrize("held", [8, ROWS_HELD])
def test_samples_in_another_order_come_into_the_caches_rows(held):
    """New samples follow in their own order, however many rows are reordered at a time."""
    numbers = list(range(50))
    random.Random(0).shuffle(numbers)
    planned, found = plan_of(range(0, 50, 2), per_shard=4), plan_of(numbers, per_shard=4)
    planned = OneSize(SIZED, 4).arrange_new(planned)
    arranged = reorder_by_ids(found, planned.id_hashes(), 4, held)
    expected = plan_of([*range(0, 50, 2), *(number for number in numbers if number % 2)], per_shard=4)
    assert arranged.digests == expected.digests
    assert pa.concat_tables(arranged.shards()) == pa.concat_tables(expected.shards())
    assert reorder_by_ids(arranged, planned.id_hashes(), 4) is arranged
    assert found.cut_like(planned, 4) is None
    grown = arranged.cut_like(planned, 4)
    assert grown.bounds.tolist() == [*range(0, 25, 4), *range(25, 50, 4), 50]
    assert pa.concat_tables(grown.shards()) == pa.concat_tables(expected.shards())
    assert grown.digests.whole == expected.digests.whole
    assert grown.digests.shards[: planned.num_shards] == planned.digests.shards
    assert str(compare_plans(planned, found)).startswith("25 new (sample-000001, sample-000003, ")
    assert str(compare_plans(found, planned)).startswith("25 gone (sample-000001, ")
