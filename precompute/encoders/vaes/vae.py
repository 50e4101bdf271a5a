"""The encoder that a frozen VAE is: the range its pixels enter in, and what of its posterior is kept."""

# Axes: N images, Y X pixels, C latent channels, H W latent cells.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.format.schema import EncoderIdentity, SampleLayout
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PIXEL_RANGES, PixelRange
from precompute.encoders.image_size import refuse_unfit

LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0
"""Bounds of a posterior's log-variance, as in diffusers' `DiagonalGaussianDistribution`."""


@dataclass(frozen=True, kw_only=True)
class FrozenVae:
    """The encode path of a VAE, on its device in its compute dtype, and what a cache must know of it."""

    moments: Callable[[Tensor], Tensor]
    """[N, 3, Y, X] to [N, 2C, H, W]: posterior mean, then log-variance."""
    class_name: str
    weights_sha256: str
    spatial_factor: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]


class VaeEncoder:
    """Maps uint8 RGB to latents, on one device."""

    def __init__(self, vae: FrozenVae, config: EncoderConfig, pixel_range: PixelRange) -> None:
        self.device = config.torch_device
        self.identity = EncoderIdentity(
            class_name=vae.class_name,
            weights_sha256=vae.weights_sha256,
            path="folded" if config.fold else "native",
            compiled=config.compile,
            posterior=config.posterior,
            compute_dtype=config.compute_dtype,
            batch_size=config.batch_size,
            latents_mean=vae.latents_mean,
            latents_std=vae.latents_std,
        )
        self._vae = vae
        self._dtype = config.torch_dtype
        self._to_range = PIXEL_RANGES[pixel_range]
        self._posterior = POSTERIORS[config.posterior]

    def layout(self, height: int, width: int) -> SampleLayout:
        """[C, H, W], with statistics of each channel; ConfigError for a size that the encoder would have to crop."""
        factor = self._vae.spatial_factor
        refuse_unfit(height, width, factor)
        channels = len(self._vae.latents_mean) * (2 if self.identity.posterior == "moments" else 1)
        return SampleLayout(
            axes=("channel", "latent_y", "latent_x"),
            shape=(channels, height // factor, width // factor),
            feature_axis="channel",
            has_preview=True,
        )

    @torch.inference_mode()
    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, C, H, W], float32, on the encoder's device."""
        pixels_N3YX = image_NYX3.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        moments_NCHW = self._vae.moments(self._to_range(pixels_N3YX.float()).to(self._dtype))
        return self._posterior(moments_NCHW).float().contiguous()


def posterior_mean(moments_NCHW: Tensor) -> Tensor:
    return moments_NCHW.chunk(2, dim=1)[0]


def posterior_moments(moments_NCHW: Tensor) -> Tensor:
    mean_NCHW, logvar_NCHW = moments_NCHW.chunk(2, dim=1)
    return torch.cat([mean_NCHW, logvar_NCHW.clamp(LOGVAR_MIN, LOGVAR_MAX)], dim=1)


POSTERIORS = {"mean": posterior_mean, "moments": posterior_moments}
