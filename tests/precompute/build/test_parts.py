"""A source is listed, planned and compared a part at a time."""

import random
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import open_plan, read_texts
from cache_store.verify.verify import verify
from precompute.build.planning import ListedParts
from precompute.build.source import Matcher, match
from precompute.config import BuildConfig, StoreConfig
from precompute.encoders.encoder_config import EncoderConfig
from precompute.sources.config import SourceConfig
from precompute.sources.images import ALL
from precompute.sources.listing import Samples
from precompute.sources.tables import make_table
from tests.make_cache import caption
from tests.precompute.conftest import SAMPLES, Project, sample_name

PER_PART = 64


class Sample(dict[str, Any]):
    """A sample that is counted while anything holds it."""

    __hash__ = object.__hash__


def sample(number: int) -> Sample:
    name = f"sample-{number:06d}"
    return Sample(id=name, uri=f"{name}.png", conversations=caption(f"this is {name}"), fingerprint="0:0")


def listed(samples: Iterable[Sample], rows: int = PER_PART) -> ListedParts:
    config = BuildConfig(
        cache="C",
        source=SourceConfig(kind="llava", path="L"),
        encoder=EncoderConfig(model="M"),
        store=StoreConfig(rows_per_part=rows),
    )
    return ListedParts(lambda _: Samples(samples), [ALL], config)


def held_at_most(count: int) -> int:
    """Return the most samples that are held at a time to list this many."""
    alive, most = WeakSet[Sample](), 0

    def counted() -> Iterator[Sample]:
        nonlocal most
        for number in range(count):
            alive.add(each := sample(number))
            most = max(most, len(alive))
            yield each

    assert sum(map(len, listed(counted()))) == count
    return most


def test_ten_times_as_many_samples_take_no_more_memory():
    assert held_at_most(200 * PER_PART) == held_at_most(20 * PER_PART) <= 2 * PER_PART


@pytest.mark.parametrize("order", ["listed", "shuffled in parts", "shuffled", "behind others"])
def test_samples_come_into_the_rows_of_their_part(order):
    """Whatever the order of the list; what is new follows in its own order."""
    ranges, numbers = [range(first, first + 20) for first in (0, 20, 40)], [*range(75)]
    planned = [make_table(map(sample, each), (), "") for each in ranges]
    if order == "shuffled in parts":
        numbers = [*chain.from_iterable(random.Random(0).sample(each, 20) for each in ranges)]
    elif order == "shuffled":
        random.Random(0).shuffle(numbers)
    elif order == "behind others":
        numbers = [*range(60, 75), *range(60)]
    matcher = Matcher(range(3), lambda part, table: match(part, planned[part], table))
    found = {each.part: each for each in matcher.find(listed(map(sample, numbers), 20))}
    assert [found[part].rows.to_pylist() for part in range(3)] == [each.to_pylist() for each in planned]
    assert not any(each.lacks.any() or each.differs.any() for each in found.values())
    new = [name for table in chain(matcher.rest, matcher.behind) for name in table["id"].to_pylist()]
    assert new == [f"sample-{number:06d}" for number in numbers if number >= 60]


@pytest.fixture
def parts(project: Project) -> Project:
    """A project whose plan will have three parts."""
    project.settings = {"store__rows_per_part": 10, "store__samples_per_shard": 4}
    return project


def test_an_id_that_two_parts_have_is_refused(parts):
    parts.edit(lambda number, record: record.update(id=sample_name(number % 15)))
    said = parts.build(name="twice", code=1)
    assert "7 sample ids came more than once" in said
    assert f"{sample_name(0)}.png, {sample_name(15)}.png" in said
    assert not [*(parts.folder / "twice").glob("*")]


def test_a_column_has_the_type_that_each_part_needs_and_a_reader_one_for_all(parts):
    parts.settings |= {"source__fields": {"extra": ["score", "note"]}}
    scores = [number if number < 10 else number / 2 for number in range(SAMPLES)]
    parts.edit(lambda number, record: record.update(score=scores[number], note="late" * (number > 19) or None))
    parts.build()
    plan, cache = open_plan(parts.cache), open_cache(parts.cache)
    types = [plan.part_rows(part, ["score", "note"]).schema.types for part in range(3)]
    assert types == [[pa.int64(), pa.null()], [pa.float64(), pa.null()], [pa.float64(), pa.string()]]
    assert read_texts(cache.store).extra == {"score": "a number", "note": "text"}
    rows = cache.samples(np.arange(len(cache)), ["row", "score", "note"])
    assert rows.schema.types[1:] == [pa.float64(), pa.string()]
    assert rows["score"].to_pylist() == [scores[row] for row in rows["row"].to_pylist()]
    assert not verify(parts.cache, "deep").findings
    parts.edit(lambda number, record: record.update(score=number if number < 10 else "high"))
    assert "score is a whole number (part 0) and text (part 2)" in parts.build(name="two kinds", code=1)


def test_a_repacked_archive_gets_its_places_anew_and_no_image_is_read(parts, monkeypatch):
    """Its part is written again, with equal digest; the cache keeps its identity."""
    parts.build()
    identity, before = open_cache(parts.cache).identity, [open_plan(parts.cache).part_rows(part) for part in range(3)]
    with zipfile.ZipFile(parts.images) as archive:
        members = [(info, archive.read(info)) for info in reversed(archive.infolist())]
    with zipfile.ZipFile(parts.images, "w") as archive:
        for info, data in members:
            archive.writestr(info, data)
    monkeypatch.setattr("precompute.inputs.frames.ImageReader.digest", None)
    parts.build()
    after = [open_plan(parts.cache).part_rows(part) for part in range(3)]
    assert all(now["place"] != then["place"] for now, then in zip(after, before, strict=True))
    assert all(
        now.drop_columns(["place"]) == then.drop_columns(["place"]) for now, then in zip(after, before, strict=True)
    )
    assert open_cache(parts.cache).identity == identity
    assert not verify(parts.cache, "deep").findings
    with parts.untouched():
        parts.build()
