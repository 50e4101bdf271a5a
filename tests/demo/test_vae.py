"""The random VAE keeps what the projector has to find."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from demo.scenes import SIDE, compose, draw
from demo.vae import encode, make_vae

IMAGES = np.stack([np.asarray(draw(compose(0, number))) for number in range(160)])
CELLS = SIDE // 8


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return make_vae(IMAGES, seed=0)


def test_the_same_seed_gives_the_same_weights(vae):
    again = make_vae(IMAGES, seed=0)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in vae.state_dict().items())


def test_standardised_latents_have_mean_zero_and_deviation_one(vae):
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    standardised = (encode(vae, IMAGES[:128]) - mean) / std
    assert standardised.mean((0, 2, 3)).abs().max() < 0.01
    assert (standardised.std((0, 2, 3)) - 1).abs().max() < 0.01


def test_a_cells_colour_is_linear_in_its_latent(vae):
    latents = encode(vae, IMAGES).permute(0, 2, 3, 1).reshape(-1, 16).double().numpy()
    blocks = IMAGES.reshape(-1, CELLS, 8, CELLS, 8, 3).mean((2, 4)).reshape(-1, 3)
    known = np.hstack([latents, np.ones((len(latents), 1))])
    half = len(known) // 2
    weights = np.linalg.lstsq(known[:half], blocks[:half])[0]
    error = ((known[half:] @ weights - blocks[half:]) ** 2).mean(0)
    assert (1 - error / blocks[half:].var(0)).min() > 0.4
