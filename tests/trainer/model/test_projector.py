"""Latents become tokens of the language model's width and size."""

import math

import pytest
import torch

from cache_store import CacheError
from tests.trainer.conftest import MEAN, STD
from tests.trainer.models import make_latents, make_projector
from trainer.model.projector import SHAPES, rms


@pytest.mark.parametrize(("layout", "tokens"), [("spatial", 6), ("channel", 4)])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_latent_becomes_start_its_tokens_and_end_of_one_size(layout, tokens, shape):
    projector, other, latents = make_projector(layout, shape), make_projector(layout, shape, seed=1), make_latents()
    assert not torch.equal(projector.layers[0].weight, other.layers[0].weight)
    projector.match_rms(latents, 1.7)
    out = projector(latents)
    assert out.shape == (64, tokens + 2, 24)
    assert projector.num_tokens == tokens + 2
    assert torch.equal(out[:, [0, -1]], projector.ends.expand(64, 2, -1))
    assert rms(out[:, 1:-1]) == pytest.approx(1.7, rel=1e-4)
    assert rms(out[:, [0, -1]]) == pytest.approx(1.7, rel=1e-4)


def test_features_are_standardised_cells_or_channels():
    latents = make_latents()
    moments = torch.cat([latents, torch.full_like(latents, torch.nan)], 1)
    spatial, channel = (make_projector(layout).features(moments) for layout in ("spatial", "channel"))
    assert torch.equal(channel[1, 2], (latents[1, 2].flatten() - MEAN[2]) / STD[2])
    assert torch.equal(spatial, channel.transpose(1, 2))


def test_latents_that_cannot_be_standardised_are_refused():
    projector, latents = make_projector(), torch.tensor(MEAN)[:, None, None].repeat(8, 1, 3, 2)
    with pytest.raises(CacheError):
        projector.match_rms(latents, 1.0)
    for value in (math.nan, math.inf, -math.inf):
        latents[[3, 7], 1, 2, 0] = value
        with pytest.raises(CacheError, match="2 of the 8"):
            projector.match_rms(latents, 1.0)
    for std in (0.0, -1.0, math.nan, math.inf):
        projector.std[2] = std
        with pytest.raises(CacheError, match=f"channel 2.* {std}"):
            projector.match_rms(latents, 1.0)
