"""Views of the same samples: each in its turn, the same on any ranks and after a resume; other samples are refused."""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cache_store.errors import ConfigError, StaleError
from cache_store.format.array import SizeRule
from tests.make_cache import make_cache
from trainer import LatentStream
from trainer.data.order import Permutation
from trainer.data.views import open_views

ROWS, BATCH = 23, 4
REJECTS = {"plain": [2, 9], "flipped": [9, 20], "cropped": []}
IMAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flipped": {"flip": True, "decode": "reduced"},
    "cropped": {"rule": SizeRule(preset="crop", sizes=((24, 24),)), "max_pixels": 9},
}
SHOWN = [row for row in range(ROWS) if row not in (2, 9, 20)]
RANDOM = np.random.default_rng(0)
SIZED = {name: [RANDOM.standard_normal(each, np.float32) for each in ((14, 4, 3, 3), (9, 4, 2, 4))] for name in IMAGES}
LATENTS = {name: [latent for size in sizes for latent in size.astype(np.float16)] for name, sizes in SIZED.items()}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three views of two sizes of images, whose shards and rejects differ too."""
    home = tmp_path_factory.mktemp("views")
    return [
        make_cache(home / name, SIZED[name], rejected=REJECTS[name], image=image, samples_per_shard=5 + place)
        for place, (name, image) in enumerate(IMAGES.items())
    ]


def test_every_epoch_shows_the_views_about_equally():
    """Another seed or cache mixes them differently; every version mixes them alike."""
    positions = np.arange(6_000)
    first, *others = (
        Permutation(identity, seed, 6_000).views_at(positions, 3) for identity, seed in [("a", 0), ("a", 1), ("b", 0)]
    )
    for shown in (first, *others):
        assert all(abs(share - 2_000) < 150 for share in Counter(shown.tolist()).values())
    assert all(0.25 < (first == other).mean() < 0.42 for other in others)
    assert "".join(map(str, Permutation("a", 0, 8).views_at(np.arange(16), 2))) == "1011011100100001"


def test_a_stream_of_views_shows_them_in_turn_and_resumes(paths):
    stream = partial(LatentStream, paths, BATCH, seed=3, epochs=3, remainder="short")
    whole = list(stream())
    seen: dict[int, list[str]] = {row: [] for row in SHOWN}
    for batch in whole:
        rows = open_views(paths).samples(batch["numbers"].numpy(), ["row"])["row"].to_pylist()
        for row, latent in zip(rows, batch["latents"].numpy(), strict=True):
            (name,) = (each for each in LATENTS if np.array_equal(LATENTS[each][row], latent))
            seen[row].append(name)
    assert all(sorted(names) == sorted(LATENTS) for names in seen.values())
    assert len({*map(tuple, seen.values())}) == 3
    resumed = stream()
    resumed.load_state_dict({"cursor": whole[6]["cursor"]})
    for expected, found in zip(whole[7:], DataLoader(resumed, batch_size=None, num_workers=2), strict=True):
        assert np.array_equal(expected["latents"], found["latents"])
    halves = [stream(rank=rank, world_size=2) for rank in (0, 1)]
    for expected, *parts in zip(whole, *halves, strict=True):
        assert np.array_equal(expected["latents"], np.concatenate([part["latents"] for part in parts]))


def test_joined_views_show_one_view_of_each_tower_together(paths):
    """`read`, which all but training uses, gives the first view."""
    views = open_views([{"a": one, "b": other} for one, other in itertools.pairwise(paths)])
    numbers = np.array([5, 0, 11])
    rows = views.rows(numbers)
    shown = views.show(numbers, np.array([1, 0, 1]))
    for name, order in (("a", ["flipped", "plain", "flipped"]), ("b", ["cropped", "flipped", "cropped"])):
        expected = [LATENTS[each][row] for each, row in zip(order, rows, strict=True)]
        np.testing.assert_array_equal(shown[name], expected)
    np.testing.assert_array_equal(views.read(numbers)["a"], [LATENTS["plain"][row] for row in rows])
    batch = next(iter(LatentStream(views, BATCH)))
    assert {*batch["latents"]} == {"a", "b"}
    assert open_views(paths[::-1]).identity != open_views(paths).identity


def test_caches_that_are_no_views_of_each_other_are_refused(paths, tmp_path):
    latents = SIZED["plain"]
    others = {
        r"samples .*--source.kind cache": {"ids": [f"other-{row}" for row in range(ROWS)]},
        r"world\.dtype +float16 +float32": {"dtype": "float32"},
        r"world\.image\.resample +bilinear +box": {"image": {"resample": "box"}},
        r"world\.encoder\.latents_std": {"latents_std": [1.0, 1.0, 1.0, 2.0]},
    }
    for number, (message, options) in enumerate(others.items()):
        with pytest.raises(StaleError, match=f"(?s){message}"):
            open_views([paths[0], make_cache(tmp_path / str(number), latents, **options)])
    with pytest.raises(ConfigError, match="views: the image of row 0 is 32x24 in .*wider, but 24x24 in"):
        LatentStream([paths[0], make_cache(tmp_path / "wider", np.zeros((ROWS, 4, 3, 4), np.float32))], BATCH)
    with pytest.raises(ConfigError, match=r"views.*1.*siglip"):
        open_views([{"world": paths[0]}, {"world": paths[1], "siglip": paths[1]}])
    with pytest.raises(ConfigError, match="two"):
        LatentStream([paths[0]], BATCH)
