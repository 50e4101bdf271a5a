"""Mixtures of streams: in their shares at any time, for any ranks and workers, and exact after a resume."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cache_store.errors import ConfigError, StaleError
from tests.make_cache import make_cache
from trainer import LatentStream, MixedStream

BATCH = 4
WEIGHTS = {"photos": 3, "prior": 1, "drawings": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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
