import math

import pytest
import torch

from cache_store import CacheError
from trainer.model.projector import LAYOUTS, SHAPES, Projector, rms

MEAN, STD = (0.5, -1.0, 2.0, 0.0), (2.0, 0.5, 3.0, 1.0)
WIDTH = 24


def make_projector(layout: str = "spatial", shape: str = "mlp", width: int = WIDTH, seed: int = 0) -> Projector:
    return Projector(latent_shape=(4, 3, 2), width=width, layout=layout, shape=shape, mean=MEAN, std=STD, seed=seed)


def make_latents(count: int = 64) -> torch.Tensor:
    noise = torch.randn(count, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


@pytest.mark.parametrize(("layout", "tokens"), [("spatial", 6), ("channel", 4)])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_latent_becomes_start_its_tokens_and_end(layout, tokens, shape):
    projector = make_projector(layout, shape)
    out = projector(make_latents(5))
    assert out.shape == (5, tokens + 2, WIDTH)
    assert projector.num_tokens == tokens + 2
    assert torch.equal(out[:, 0], projector.ends_2D[0].expand(5, -1))
    assert torch.equal(out[:, -1], projector.ends_2D[1].expand(5, -1))


def test_layouts_place_cells_and_channels_as_they_say():
    latents = torch.arange(2 * 4 * 3 * 2).view(2, 4, 3, 2)
    assert LAYOUTS["spatial"](latents)[1, 3].tolist() == latents[1, :, 1, 1].tolist()
    assert LAYOUTS["channel"](latents)[1, 2].tolist() == latents[1, 2].flatten().tolist()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_features_are_standardised_and_of_the_means_alone(layout):
    latents = make_latents(4_096)
    features = make_projector(layout).features(latents)
    assert rms(features) == pytest.approx(1, abs=0.01)
    moments = torch.cat([latents, torch.full_like(latents, torch.nan)], 1)
    assert torch.equal(make_projector(layout).features(moments), features)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_matched_tokens_have_the_asked_rms(layout, shape):
    projector, latents = make_projector(layout, shape), make_latents()
    projector.match_rms(latents, 1.7)
    out = projector(latents)
    assert rms(out[:, 1:-1]) == pytest.approx(1.7, rel=1e-4)
    assert rms(out[:, [0, -1]]) == pytest.approx(1.7, rel=1e-4)


def test_equal_seeds_give_equal_weights():
    one, same, other = (make_projector(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.weight"], other["layers.0.weight"])


@pytest.mark.parametrize(
    ("value", "std", "message"),
    [
        (None, 3.0, "nothing to learn"),
        *((value, 3.0, "2 of the 8 samples .* hold NaN or infinity") for value in (math.nan, math.inf, -math.inf)),
        *((1.0, std, f"latent channel 2 cannot .* deviation {std}") for std in (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_latents_that_cannot_be_standardised_are_refused(value, std, message):
    """`value` in two samples that else are the mean; the standard deviation of channel 2."""
    projector, latents = make_projector(), torch.tensor(MEAN)[:, None, None].repeat(8, 1, 3, 2)
    if value is not None:
        latents[[3, 7], 1, 2, 0] = value
    projector.std_C11[2] = std
    with pytest.raises(CacheError, match=message):
        projector.match_rms(latents, 1.0)
