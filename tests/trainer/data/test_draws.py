"""What is shown at a position: a view, a latent drawn from a posterior, a caption or none; seed and position decide."""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cache_store import JoinedCache, open_cache, open_joined
from cache_store.errors import ConfigError, StaleError
from cache_store.format.array import SizeRule
from tests.make_cache import make_cache, text_recipe
from trainer import LatentStream, caption_dropped, sample_posterior
from trainer.data.order import Permutation
from trainer.data.views import open_views

CHANNELS, CELLS = 3, (5, 7)


def make_moments(count: int) -> torch.Tensor:
    """Means about 1, deviations about 1, all different."""
    moments = torch.randn(count, 2 * CHANNELS, *CELLS, generator=torch.Generator().manual_seed(0))
    moments[:, :CHANNELS] += 1
    return moments


def test_draws_have_the_posteriors_mean_and_deviation():
    """Each of 105 values does, within four standard errors; no two values correlate."""
    draws, moments = 4_000, make_moments(1)
    mean, std = moments[0, :CHANNELS], (moments[0, CHANNELS:] / 2).exp()
    noise = (sample_posterior(moments.expand(draws, -1, -1, -1), 0, range(draws)) - mean) / std
    assert noise.mean(0).abs().max() < 4 / draws**0.5
    assert (noise.std(0) - 1).abs().max() < 4 / (2 * draws) ** 0.5
    assert noise.flatten(1).T.corrcoef().fill_diagonal_(0).abs().max() < 5 / draws**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_draw_depends_on_its_seed_and_position_alone(dtype):
    """The batch that it is drawn in does not matter."""
    moments, positions = make_moments(9).to(dtype), [0, 3, 2**40, 5, 9, 1, 77, 8, 2**62]
    whole = sample_posterior(moments, 1, positions)
    assert (whole.dtype, whole.shape) == (torch.float32, (9, CHANNELS, *CELLS))
    for part in (slice(0, 1), slice(4, 9), slice(0, 9, 2)):
        assert torch.equal(sample_posterior(moments[part], 1, positions[part]), whole[part])
    shown_again = sample_posterior(moments[:1].expand(9, -1, -1, -1), 1, positions)
    others = sample_posterior(moments[:1], 2, [0]), sample_posterior(moments[:1], 1, [0], tower=1)
    assert len({each.numpy().tobytes() for each in (*shown_again, *others)}) == 11
    drawn = sample_posterior(torch.tensor([0.5, -2.0, 0.0, 1.0]).view(1, 4, 1, 1), 3, [41])
    assert drawn.flatten().tolist() == pytest.approx([0.6465368, 0.3118525], abs=1e-6), "in every version"


def test_arrays_are_drawn_from_as_tensors_and_what_is_no_moments_is_refused():
    moments, drawn = make_moments(2), partial(sample_posterior, seed=1, positions=[3, 4])
    assert torch.equal(drawn(moments.numpy()), drawn(moments))
    for name, wrong in {"moments": moments[:, :3], "seed": -1, "positions": [0.5, 1]}.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            drawn(**{"moments_NMHW": moments, "moments_NMHW" if name == "moments" else name: wrong})


@pytest.mark.parametrize("clips", [False, True], ids=["images", "clips"])
@pytest.mark.parametrize("posterior", ["mean", "moments"])
def test_normalised_latents_are_drawn_first_and_float32(tmp_path: Path, posterior: str, clips: bool):
    """`cache.read` normalises alike; frames may number as channels."""
    channels = CHANNELS if posterior == "moments" else 2 * CHANNELS
    scale = {"latents_mean": [0.5] * channels, "latents_std": [2.0, 3.0] * (channels // 2) + [4.0] * (channels % 2)}
    samples = [make_moments(10).numpy()]
    if clips:
        samples = [np.stack([samples[0][:, :, :2]] * frames, 2) for frames in (channels, channels + 1)]
    path = make_cache(tmp_path / "cache", samples, posterior=posterior, clips=clips, **scale)
    cache, encoder = open_cache(path), open_cache(path).spec.array.encoder
    for name, stream in (("alone", cache), ("a", {"a": path})):
        for batch in LatentStream(stream, 5, seed=3, normalize=True):
            stored = torch.from_numpy(cache.read(batch["numbers"].numpy()))
            drawn = sample_posterior(stored, 3, batch["positions"].tolist()) if posterior == "moments" else stored
            latents = batch["latents"] if name == "alone" else batch["latents"]["a"]
            axes = -1, *[1] * (stored.ndim - 2)
            mean, std = (torch.tensor(values).view(axes) for values in (encoder.latents_mean, encoder.latents_std))
            assert latents.dtype == torch.float32
            assert torch.equal(latents, (drawn.float() - mean) / std)
    if posterior == "mean":
        assert np.array_equal(cache.read(batch["numbers"].numpy(), normalize=True), batch["latents"]["a"].numpy())


ROWS, TOKENS, RATE = 40, 6, 0.3


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> JoinedCache:
    """Latents and two text encoders' samples, all above 1; null prompts are zeros of one token."""
    folder: Path = tmp_path_factory.mktemp("dropout")
    rng = np.random.default_rng(0)
    shapes = {"world": (4, 3, 3), "tokens": (TOKENS, 8), "more": (TOKENS, 2)}
    return open_joined(
        {
            name: make_cache(
                folder / name,
                1 + rng.random((ROWS, *shape), np.float32),
                text=None if name == "world" else text_recipe(TOKENS),
            )
            for name, shape in shapes.items()
        }
    )


def test_a_position_is_decided_by_seed_and_rate_alone():
    positions = np.arange(20_000)
    dropped = caption_dropped(positions, 0, RATE)
    assert abs(dropped.mean() - RATE) < 0.01
    scattered = np.random.default_rng(0).permutation(positions)[:500]
    np.testing.assert_array_equal(caption_dropped(scattered, 0, RATE), dropped[scattered])
    assert (caption_dropped(positions, 1, RATE) != dropped).mean() > 0.3
    assert not (dropped & ~caption_dropped(positions, 0, 2 * RATE)).any()
    assert caption_dropped(positions[:9], 0, 1.0).all()
    assert not caption_dropped(positions[:9], 0, 0.0).any()
    assert "".join(str(int(each)) for each in dropped[:24]) == "000010101001010101000000"


@pytest.mark.parametrize("options", [{}, {"shuffle_block": 4}])
def test_dropped_captions_are_null_prompts_with_their_masks_and_others_stay(joined, options):
    """Images stay too; a shuffle in blocks, which holds samples, gives them whole in a later epoch."""
    plain, dropping = (LatentStream(joined, 4, seed=5, epochs=3, caption_dropout=rate, **options) for rate in (0, RATE))
    for one, other in zip(plain, dropping, strict=True):
        dropped = torch.from_numpy(caption_dropped(one["positions"], 5, RATE))
        assert torch.equal(one["latents"]["world"], other["latents"]["world"])
        for name in ("tokens", "more"):
            assert torch.equal(one["latents"][name][~dropped], other["latents"][name][~dropped])
            assert (other["latents"][name][dropped] == 0).all()
            assert (one["latents"][name] >= 1).all()
            assert torch.equal(one["mask"][name][~dropped], other["mask"][name][~dropped])
            assert other["mask"][name][dropped].sum(1).tolist() == [1] * int(dropped.sum())


def test_dropout_without_texts_or_beyond_its_range_is_refused(joined):
    for cache, rate in ((joined.caches["world"], 0.1), (joined, 1.1)):
        with pytest.raises(ConfigError, match="caption_dropout"):
            LatentStream(cache, 4, caption_dropout=rate)


VIEWED, BATCH = 23, 4
REJECTS = {"plain": [2, 9], "flipped": [9, 20], "cropped": []}
IMAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flipped": {"flip": True, "decode": "reduced"},
    "cropped": {"rule": SizeRule(preset="crop", sizes=((24, 24),)), "max_pixels": 9},
}
SHOWN = [row for row in range(VIEWED) if row not in (2, 9, 20)]
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
        r"samples .*--source.kind cache": {"ids": [f"other-{row}" for row in range(VIEWED)]},
        r"world\.dtype +float16 +float32": {"dtype": "float32"},
        r"world\.image\.resample +bilinear +box": {"image": {"resample": "box"}},
        r"world\.encoder\.latents_std": {"latents_std": [1.0, 1.0, 1.0, 2.0]},
    }
    for number, (message, options) in enumerate(others.items()):
        with pytest.raises(StaleError, match=f"(?s){message}"):
            open_views([paths[0], make_cache(tmp_path / str(number), latents, **options)])
    with pytest.raises(ConfigError, match="views: the image of row 0 is 32x24 in .*wider, but 24x24 in"):
        LatentStream([paths[0], make_cache(tmp_path / "wider", np.zeros((VIEWED, 4, 3, 4), np.float32))], BATCH)
    with pytest.raises(ConfigError, match=r"views.*1.*siglip"):
        open_views([{"world": paths[0]}, {"world": paths[1], "siglip": paths[1]}])
    with pytest.raises(ConfigError, match="two"):
        LatentStream([paths[0]], BATCH)
