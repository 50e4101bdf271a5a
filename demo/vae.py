"""A narrow stand-in for the Cosmos VAE: the same architecture (`AutoencoderKLWan`), a sixth as wide, random weights.

A trained VAE keeps flat colour, but plain random convolutions scramble it. Three changes to the random weights keep it,
without training: in the layers that shrink the image, the mean of each 3 x 3 filter is multiplied by `MEAN_BOOST`;
residual branches are damped; and the first layer has random biases, so that normalisation cannot remove brightness.
"""
# Axes: N images, C latent channels, H W latent cells, Y X image pixels.

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

BASE_WIDTH = 16
"""Channels of the first layer; 96 in Cosmos-Predict2."""

MEAN_BOOST = 3.0
RESIDUAL_DAMPING = 0.3
AT_LATENT_SIZE = ("down_blocks.6", "mid_block", "conv_out")
"""Layers that see neighbouring cells; here plain filters tell shapes better."""

STATISTICS_IMAGES = 128


def make_vae(images_NYX3: np.ndarray, seed: int) -> AutoencoderKLWan:
    """Make a frozen VAE whose config has the mean and deviation of its latents, measured on these uint8 images."""
    vae = random_vae(seed)
    latents_NCHW = encode(vae, images_NYX3[:STATISTICS_IMAGES])
    std_C, mean_C = torch.std_mean(latents_NCHW, dim=(0, 2, 3))
    vae.register_to_config(latents_mean=rounded(mean_C), latents_std=rounded(std_C))
    return vae


def random_vae(seed: int) -> AutoencoderKLWan:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(base_dim=BASE_WIDTH, num_res_blocks=1).eval().requires_grad_(False)
        for name, weight in vae.encoder.named_parameters():
            if weight.ndim >= 4:
                boost = 1.0 if name.startswith(AT_LATENT_SIZE) else MEAN_BOOST
                is_residual = ".conv2." in name or name.endswith("attentions.0.proj.weight")
                weight.copy_(keep_variance(weight, boost) * (RESIDUAL_DAMPING if is_residual else 1.0))
        vae.encoder.conv_in.bias.normal_()
    return vae


def keep_variance(weight: Tensor, mean_boost: float) -> Tensor:
    """Boost the flat part of the filters, and scale them to keep the signal's variance.

    torch draws with variance 1 / (3 · fan_in), and a still image uses only one of the three temporal taps.
    """
    if weight.shape[-1] == 3:
        flat = weight.mean((-2, -1), keepdim=True)
        weight = (weight - flat + mean_boost * flat) * 3 / (8 + mean_boost**2) ** 0.5
    return weight * (3**0.5 if weight.ndim == 4 else 3.0)


@torch.no_grad()
def encode(vae: AutoencoderKLWan, images_NYX3: np.ndarray) -> Tensor:
    """Encode uint8 RGB images to posterior means [N, C, H, W]."""
    pixels = torch.from_numpy(images_NYX3).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1
    latents: Tensor = vae.encode(pixels).latent_dist.mode().squeeze(2)
    return latents


def rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
