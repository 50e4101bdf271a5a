"""VAEs with random weights, and a small decoder."""

from functools import partial
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan


def random_vae(**config: Any) -> Any:
    """Make an AutoencoderKLWan whose gains and biases are as far from their initial values as trained ones are."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**{"decoder_base_dim": 8, **config}).eval().requires_grad_(False)
    for name, weight in vae.encoder.named_parameters():
        if name.endswith("gamma"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.1)
    return vae


narrow_vae = partial(random_vae, base_dim=8)


@pytest.fixture
def vae() -> Any:
    """A narrow VAE with four channels, whose weights are exact in bfloat16."""
    return narrow_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).bfloat16().float()
