"""Latents drawn from the posteriors that a cache of moments holds: mean + std · noise, a new one at every position.

The noise comes from Philox (Salmon et al. 2011), a counter-based generator: its key is the seed and its counter begins
at the position, so a sample's noise is known at once, in any batch, on any rank, after any resume.
"""
# Axes: N samples, M moments: C means, then C log-variances, H W latent cells.

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from cache_store import JoinedCache
from cache_store.errors import ConfigError


def sample_posterior(moments_NMHW: Tensor, seed: int, positions: Iterable[int], tower: int = 0) -> Tensor:
    """Draw a latent of each sample: [N, C, H, W] float32, of moments in any dtype on the CPU.

    `positions` says of each how many samples were shown before it. What is drawn is a pure function of the moments and
    of (seed, position); `tower` tells apart what several encoders made of one image.
    """
    count, moments, *cells = moments_NMHW.shape
    latents_NCHW = torch.empty(count, moments // 2, *cells)
    for latent_CHW, moments_MHW, position in zip(latents_NCHW.numpy(), moments_NMHW, positions, strict=True):
        # One by one: how a whole batch is cut into vectors and threads would decide its last bits.
        mean_CHW, logvar_CHW = np.split(moments_MHW.float().numpy(), 2)
        philox = Philox(key=[seed, tower], counter=[0, 0, 0, int(position)])
        Generator(philox).standard_normal(dtype=np.float32, out=latent_CHW)
        latent_CHW *= np.exp(logvar_CHW / 2)
        latent_CHW += mean_CHW
    return latents_NCHW


def sampled_towers(cache: JoinedCache, wanted: Literal["sample", "mean"] | None) -> tuple[str, ...]:
    """Name the towers whose latents training draws; ConfigError where it is to draw some, and none has moments."""
    sampled = tuple(name for name, each in cache.caches.items() if each.spec.array.encoder.posterior == "moments")
    if wanted == "sample" and not sampled:
        raise ConfigError(
            f"data.posterior: sample needs posterior moments, and {cache.first.store} holds none: leave it out, or "
            "build a cache of them with `precompute build … --encoder.posterior moments`"
        )
    return () if wanted == "mean" else sampled
