"""The plan of a source larger than memory is made, compared and reordered a few shards at a time."""

import random
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.cache.metadata import put_part, put_texts
from cache_store.errors import SourceError
from cache_store.format.layout import part_file
from cache_store.storage.local import LocalStore
from precompute.rerun.arrange import OneSize
from precompute.rerun.match_rows import ROWS_HELD, compare_plans, reorder_by_ids
from precompute.rerun.rows import ListedRows, cut_like, rows_in_scratch
from precompute.rerun.source_plan import make_plan, refuse_duplicates, sorted_by_id
from precompute.sources.listing import Samples
from tests.make_cache import caption, sized_array

PER_SHARD = 64
SIZED = sized_array((1, 1, 1), None)


class Sample(dict[str, Any]):
    """A sample that is counted while anything holds it."""

    __hash__ = object.__hash__


def sample(number: int) -> Sample:
    name = f"sample-{number:06d}"
    return Sample(id=name, uri=f"{name}.png", conversations=caption(f"this is {name}"), fingerprint="0:0")


def plan_of(numbers: Iterable[int], per_shard: int = PER_SHARD) -> ListedRows:
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
    assert len(plan) == count
    return most[0], most[1]


def test_ten_times_as_many_samples_take_no_more_memory():
    """Only the ids' hashes and the index of row groups grow."""
    few, many = held_at_most(20 * PER_SHARD), held_at_most(200 * PER_SHARD)
    assert many[0] == few[0] <= 2 * PER_SHARD
    assert many[1] < 1.5 * few[1] + 2**20


def test_footers_do_not_grow_with_captions(tmp_path):
    store, sizes = LocalStore(tmp_path), list[list[int]]()
    for length in (1, 3_000):
        captioned = (sample(number) | {"conversations": caption(chr(97 + number) * length)} for number in range(20))
        shards = [*make_plan(Samples(captioned, in_rows=True), 1).shards()]
        put_part(store, 0, zip(shards, repeat("8x8")))
        texts = put_texts(store, 0, shards).file(0)
        sizes.append([pq.read_metadata(tmp_path / name).serialized_size for name in (part_file(0), texts.path)])
    assert max(sizes[1]) < 20 * 1_024
    np.testing.assert_allclose(*sizes, rtol=0.02)


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
    found, expected = rows_in_scratch(shards), plan_of(range(count), per_shard=20)
    names = ["id", "uri", "conversations", "fingerprint"]
    assert pa.concat_tables(found.shards(names)) == pa.concat_tables(expected.shards(names))


@pytest.mark.parametrize("held", [8, ROWS_HELD])
def test_samples_in_another_order_come_into_the_caches_rows(held):
    """New samples follow in their own order, however many rows are reordered at a time."""
    numbers = list(range(50))
    random.Random(0).shuffle(numbers)
    planned, found = plan_of(range(0, 50, 2), per_shard=4), plan_of(numbers, per_shard=4)
    sizes = OneSize(SIZED, 4, rows_per_part=16)
    planned = sizes.arrange_new(planned)
    arranged = reorder_by_ids(found, planned.id_hashes(), 4, held)
    expected = plan_of([*range(0, 50, 2), *(number for number in numbers if number % 2)], per_shard=4)
    assert pa.concat_tables(arranged.shards()) == pa.concat_tables(expected.shards())
    assert reorder_by_ids(arranged, planned.id_hashes(), 4) is arranged
    assert cut_like(found, planned) is None
    assert cut_like(arranged, planned).digests == planned.digests
    assert sizes.arrange_added(planned, found) is None
    grown = sizes.arrange_added(planned, arranged)
    assert grown.cut.bounds.tolist() == [*range(0, 25, 4), *range(25, 50, 4), 50]
    assert [part.rows for part in grown.digests.parts] == [16, 9, 16, 9]
    assert pa.concat_tables(grown.shards()) == pa.concat_tables(expected.shards())
    assert grown.digests.shards[: planned.num_shards] == planned.digests.shards
    assert str(compare_plans(planned, found)).startswith("25 new (sample-000001, sample-000003, ")
    listed, shuffled = plan_of(range(0, 50, 2)), sizes.arrange_new(found)
    assert str(compare_plans(shuffled, listed)).startswith("25 gone (sample-000001, ")
