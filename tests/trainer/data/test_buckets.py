"""Batches of one size from caches of several, and mixtures of streams, for any ranks, workers and resumes."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cache_store import open_cache, open_joined
from cache_store.errors import ConfigError, StaleError
from tests.make_cache import make_cache, text_recipe
from trainer import LatentStream, MixedStream
from trainer.data.buckets import SampleOrder

BATCH = 4
SHAPES, ROWS = [(4, 3, 3), (4, 2, 5), (4, 6, 2)], [13, 7, 3]
REJECTED = [2, 14]
CHOSEN = np.array([20, 3, 5, 18, 13, 0, 1, 12, 11, 8, 10])
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def latents_of(shapes: list[Any], rows: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((count, *shape), np.float32) for count, shape in zip(rows, shapes, strict=True)]


LATENTS = latents_of(SHAPES, ROWS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12, 6 and 3 samples of three sizes, in shards of 5 rows at most."""
    path = tmp_path_factory.mktemp("sizes") / "cache"
    return make_cache(path, LATENTS, rejected=REJECTED, samples_per_shard=5)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 samples of one size."""
    return make_cache(tmp_path_factory.mktemp("one") / "cache", LATENTS[0], samples_per_shard=5)


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch["numbers"].tolist() for batch in batches]


@pytest.mark.parametrize("counts", [(12, 6, 3), (1,), (0, 5, 0, 1), (97, 3, 40, 41)])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("remainder", ["carry", "short", "repeat"])
def test_each_epoch_of_a_size_shows_its_samples_once_in_batches_of_that_size(counts, batch_size, remainder):
    order, epochs = SampleOrder("cache", 0, counts, batch_size, remainder), 2 * batch_size
    per_epoch = np.array(counts) / batch_size if remainder == "carry" else -(-np.array(counts) // batch_size)
    total = int((epochs * per_epoch).sum() + 1e-9)
    batches = [order.at(order.batch(number)) for number in range(total)]
    firsts = np.cumsum([0, *counts])
    shown = [Counter[int]() for _ in counts]
    for batch in batches:
        (bucket,) = {int(each) for each in np.searchsorted(firsts, batch, side="right") - 1}
        shown[bucket].update(batch.tolist())
        assert remainder == "short" or len(batch) == batch_size
    for bucket, count in enumerate(counts):
        own = set(range(firsts[bucket], firsts[bucket + 1]))
        assert {*shown[bucket]} == own
        assert remainder != "repeat" or min(shown[bucket].values(), default=epochs) >= epochs
        assert remainder == "repeat" or {*shown[bucket].values()} <= {epochs}
        assert remainder != "carry" or sum(shown[bucket].values()) == epochs * count


def test_sizes_decide_the_order_in_every_version():
    """Bits of the order that a resumed run relies on."""
    for remainder, expected in (
        ("carry", [[7, 5], [0, 1], [9, 8], [5, 7]]),
        ("short", [[7, 5], [0, 1], [9, 8], [5]]),
        ("repeat", [[7, 5], [0, 1], [9, 8], [5, 6]]),
    ):
        order = SampleOrder("cache", 7, (5, 3, 2), 2, remainder)
        batches = [order.at(order.batch(number)).tolist() for number in (0, 1, 2, 10**9)]
        assert batches == expected, remainder


@pytest.mark.parametrize("name", ["cache", "one"])
@pytest.mark.parametrize("samples", [None, CHOSEN], ids=["all", "chosen"])
@pytest.mark.parametrize(("remainder", "block"), [("carry", 1), ("carry", 4), ("short", 1), ("repeat", 1)])
def test_every_batch_has_one_size_on_any_ranks_workers_and_resumes(name, remainder, block, samples, request):
    stored = open_cache(request.getfixturevalue(name))
    samples = None if samples is None else samples[samples < len(stored)]
    options: dict[str, Any] = {"samples": samples, "epochs": 3, "remainder": remainder, "seed": 5}
    stream = partial(LatentStream, stored, BATCH, shuffle_block=block, **options)
    batches = list(stream())
    whole = numbers_of(batches)
    for batch in batches:
        np.testing.assert_array_equal(batch["latents"].numpy(), stored.read(batch["numbers"].numpy()))
    positions = [position for batch in batches for position in batch["positions"].tolist()]
    assert len({*positions}) == sum(map(len, whole))
    if remainder != "carry":
        first, chosen = (
            [*itertools.chain(*numbers_of(stream(epochs=1)))],
            range(len(stored)) if samples is None else samples,
        )
        assert {*first} == {*chosen}
        assert remainder == "repeat" or len(first) == len(chosen)
    if min(map(len, whole)) > 1:
        halves = zip(*(stream(rank=rank, world_size=2) for rank in (0, 1)), strict=True)
        for batch, parts in zip(batches, halves, strict=True):
            for key in ("numbers", "positions", "latents"):
                assert torch.equal(torch.cat([part[key] for part in parts]), batch[key])
    for workers in (1, 3) if block == 1 else (1,):
        assert numbers_of(DataLoader(stream(), batch_size=None, num_workers=workers)) == whole
    with ThreadPoolExecutor(4) as pool:
        assert numbers_of(pool.map(stream().batch, range(len(whole)))) == whole
    for consumed, batch in enumerate(batches, 1):
        resumed = stream()
        resumed.load_state_dict({**stream().state_dict(), "cursor": batch["cursor"]})
        assert numbers_of(resumed) == whole[consumed:]
    assert numbers_of(itertools.islice(stream(epochs=None), len(whole))) == whole
    half = stream(epochs=0.5)
    assert [*itertools.chain.from_iterable(numbers_of(half) for _ in range(6))] == whole


def test_what_cannot_be_shown_or_resumed_is_refused(cache):
    with pytest.raises(ConfigError, match=r"40x16.* 6 samples.* 4 ranks.*repeat"):
        LatentStream(cache, BATCH, world_size=4, remainder="short")
    with pytest.raises(ConfigError, match="remainder.*drop"):
        LatentStream(cache, BATCH, remainder="drop")  # type: ignore[arg-type]
    for weights in (np.ones(20), np.full(21, 0.5), -np.ones(21), np.zeros(21)):
        with pytest.raises(ConfigError, match="weights"):
            LatentStream(cache, BATCH, weights=weights)
    with pytest.raises(ConfigError, match="shuffle_block 4 needs `remainder: carry`"):
        LatentStream(cache, BATCH, shuffle_block=4, remainder="repeat")
    with pytest.raises(StaleError, match=r"remainder +carry +short"):
        LatentStream(cache, BATCH, remainder="short").load_state_dict(LatentStream(cache, BATCH).state_dict())


def test_joined_images_are_grouped_by_both_sizes_and_texts_join_by_row(tmp_path):
    rows, texts = sum(ROWS), np.random.default_rng(2).standard_normal((sum(ROWS), 6, 8), np.float32)
    others = latents_of([(2, 1, 1), (2, 4, 4)], [9, 14], seed=3)
    paths = {
        "world": make_cache(tmp_path / "world", LATENTS, rejected=REJECTED, samples_per_shard=5),
        "small": make_cache(tmp_path / "small", others, rejected=[4], samples_per_shard=6),
        "text": make_cache(tmp_path / "text", texts, samples_per_shard=23, text=text_recipe(6)),
    }
    batches = list(LatentStream(paths, BATCH, remainder="short"))
    by_row = {"world": [*itertools.chain(*LATENTS)], "small": [*itertools.chain(*others)], "text": [*texts]}
    pairs = set()
    for batch in batches:
        places = open_joined(paths).samples(batch["numbers"].numpy(), ["row"])["row"].to_pylist()
        for name, shown in batch["latents"].items():
            np.testing.assert_array_equal(shown.numpy(), [by_row[name][row].astype(np.float16) for row in places])
        pairs.add(tuple(batch["latents"][name].shape[1:] for name in ("world", "small")))
    assert len(pairs) == 4
    assert sorted(itertools.chain(*numbers_of(batches))) == list(range(rows - 3))
    swapped = LatentStream(dict(reversed(paths.items())), BATCH, remainder="short")
    assert numbers_of(swapped) == numbers_of(batches)


@pytest.mark.parametrize("samples", [None, CHOSEN], ids=["all", "chosen"])
def test_an_epoch_shows_a_sample_as_often_as_its_weight_says(cache, samples):
    chosen = np.arange(21) if samples is None else samples
    weights = np.arange(len(chosen)) % 4
    given = {"samples": samples, "weights": weights, "remainder": "short"}
    batches = list(LatentStream(cache, BATCH, epochs=4, **given))
    seen = Counter(itertools.chain(*numbers_of(batches)))
    assert seen == Counter(dict(zip(chosen.tolist(), (4 * weights).tolist(), strict=True)))
    resumed = LatentStream(cache, BATCH, epochs=4, **given)
    resumed.load_state_dict({**resumed.state_dict(), "cursor": batches[2]["cursor"]})
    assert numbers_of(resumed) == numbers_of(batches)[3:]


WEIGHTS = {"photos": 3, "prior": 1, "drawings": 0.5}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three caches, one of them of two image sizes."""
    home, random = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    shapes = {"photos": [(13, 4, 3, 3), (7, 4, 2, 5)], "prior": [(10, 4, 3, 3)], "drawings": [(6, 4, 1, 1)]}
    return {
        name: make_cache(home / name, [random.standard_normal(each, np.float32) for each in sizes])
        for name, sizes in shapes.items()
    }


def mixed(
    paths: dict[str, Path], weights: dict[str, float] = WEIGHTS, seed: int = 0, batches: int = 30, **options: Any
) -> MixedStream:
    streams = {name: LatentStream(path, BATCH, **options) for name, path in paths.items()}
    return MixedStream(streams, weights, seed=seed, batches=batches)


def shown(batches: Any) -> list[tuple[str, list[int]]]:
    return [(batch["stream"], batch["numbers"].tolist()) for batch in batches]


def test_each_stream_has_its_share_at_any_time_and_gives_its_batches_in_turn(paths):
    mixture, seen = mixed(paths, seed=2), Counter[str]()
    for number in range(900):
        name, own = mixture.place(number)
        assert own == seen[name]
        seen[name] += 1
        for each, weight in WEIGHTS.items():
            assert abs(seen[each] - (number + 1) * weight / 4.5) <= 3
    name, own = mixture.place(10**12)
    assert abs(own - 10**12 * WEIGHTS[name] / 4.5) <= 3


def test_the_seed_decides_the_order_in_every_version(paths):
    places = [[mixed(paths, seed=seed).place(number)[0][:2] for number in range(12)] for seed in (0, 1)]
    assert [" ".join(each) for each in places] == [
        "ph ph dr ph ph pr ph ph pr ph ph dr",
        "ph ph pr ph ph pr ph ph dr ph ph pr",
    ]


def test_a_mixture_is_exact_on_any_ranks_workers_and_resumes(paths):
    batches = list(mixed(paths))
    whole = shown(batches)
    for number, (name, numbers) in enumerate(whole):
        alone = LatentStream(paths[name], BATCH).batch(mixed(paths).place(number)[1])
        assert numbers == alone["numbers"].tolist()
    for workers in (1, 3):
        assert shown(DataLoader(mixed(paths), batch_size=None, num_workers=workers)) == whole
    halves = [shown(mixed(paths, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [(name, left + right) for (name, left), (_, right) in zip(*halves, strict=True)] == whole
    for consumed, batch in enumerate(batches, 1):
        resumed = mixed(paths)
        resumed.load_state_dict({**mixed(paths).state_dict(), "cursor": batch["cursor"]})
        assert shown(resumed) == whole[consumed:]


def test_another_mixture_is_refused_and_so_is_what_is_none(paths):
    state, prior = mixed(paths).state_dict(), LatentStream(paths["prior"], BATCH, seed=1)
    for field, other in {
        "mixture": mixed(paths, {**WEIGHTS, "prior": 2}),
        r"prior\.seed": MixedStream({**mixed(paths).streams, "prior": prior}, WEIGHTS),
        "cache": prior,
    }.items():
        with pytest.raises(StaleError, match=rf"{field} "):
            other.load_state_dict(state)
    one = partial(LatentStream, paths["photos"])
    for streams, weights, named in (
        ({"a": one(4)}, {"a": 1}, "two streams"),
        ({"a": one(4), "b": one(4)}, {"a": 1, "b": 0}, "b must be above 0"),
        ({"a": one(4), "b": one(8)}, {"a": 1, "b": 1}, "batch_size"),
    ):
        with pytest.raises(ConfigError, match=named):
            MixedStream(streams, weights)
    with pytest.raises(ConfigError, match="batches"):
        mixed(paths, batches=0)
