"""Latents as a VAE gives them, and as its diffusion models are trained on them: one way and back.

A cache holds the first. What makes the second of it stands in the cache's `encoder` (`Normalization`), in one form for
all VAEs, which is what the pipelines of diffusers compute, each in words of its own:

    AutoencoderKL            (z - shift_factor) * scaling_factor          FluxImg2ImgPipeline._encode_vae_image
    AutoencoderKL with mean  (z - mean) * scaling_factor / std            StableDiffusionXLImg2ImgPipeline
    AutoencoderKLFlux2       (2x2 cells of z - mean) / sqrt(var + eps)    Flux2Pipeline._encode_vae_image
    AutoencoderKLWan         (z - mean) * (1 / std)                       WanImageToVideoPipeline.prepare_latents
    AutoencoderKLQwenImage   (z - mean) * (1 / std)                       QwenImageImg2ImgPipeline._encode_vae_image
    AutoencoderKLCosmos      (z - mean) * sigma_data / std                CosmosVideoToWorldPipeline.prepare_latents
    AutoencoderDC            z * scaling_factor                           SanaPipeline.__call__, inverted

Functions take numpy arrays and torch tensors, on any device, and return float32 of the same kind.
"""

# Axes: C channels, H W latent cells, P a patch's side; any axes before these.

from typing import Any, TypeVar

import numpy as np

from cache_store.errors import ConfigError
from cache_store.format.schema import EncoderIdentity, Normalization

Samples = TypeVar("Samples")
"""A numpy array or a torch tensor."""


def normalize(latents_CHW: Samples, by: Normalization) -> Samples:
    """Map latents as a cache holds them to what a diffusion model is trained on.

    [..., C, H, W] becomes [..., C·P², H/P, W/P], which is the same where there are no patches. `by` is the cache's
    encoder: `cache.spec.array.encoder`.
    """
    refuse_moments(by)
    latents = stacked(as_float32(latents_CHW), by.latents_patch)
    if by.latents_shift is not None:
        latents = latents - by.latents_shift
    if by.latents_mean:
        latents = latents - per_channel(by.latents_mean, latents)
    if by.latents_scale is not None:
        latents = latents * by.latents_scale
    if by.latents_std:
        latents = latents / per_channel(by.latents_std, latents)
    return latents  # type: ignore[no-any-return]


def denormalize(latents_CHW: Samples, by: Normalization) -> Samples:
    """Map what a diffusion model gives back to what a VAE's decoder takes: the inverse of `normalize`."""
    latents = as_float32(latents_CHW)
    if by.latents_std:
        latents = latents * per_channel(by.latents_std, latents)
    if by.latents_scale is not None:
        latents = latents / by.latents_scale
    if by.latents_mean:
        latents = latents + per_channel(by.latents_mean, latents)
    if by.latents_shift is not None:
        latents = latents + by.latents_shift
    return spread(latents, by.latents_patch)  # type: ignore[no-any-return]


def refuse_moments(by: Normalization) -> None:
    """Raise ConfigError for a posterior's moments: a latent is drawn of them first."""
    if isinstance(by, EncoderIdentity) and by.posterior == "moments":
        raise ConfigError(
            "normalize: the cache holds posterior moments, of which a latent is drawn before it is normalised; use "
            "LatentStream(…, normalize=True), or normalize what you drew"
        )


def drawn(by: EncoderIdentity) -> Normalization:
    """The normalisation of latents that were drawn of a cache's posteriors."""
    return Normalization(**{name: getattr(by, name) for name in Normalization.__struct_fields__})


def as_float32(samples: Any) -> Any:
    return samples.astype(np.float32) if isinstance(samples, np.ndarray) else samples.float()


def per_channel(values: tuple[float, ...], like: Any) -> Any:
    """[C, 1, 1], of the kind and on the device of `like`."""
    of_kind = np.array(values, np.float32) if isinstance(like, np.ndarray) else like.new_tensor(values)
    return of_kind.reshape(-1, 1, 1)


def stacked(latents_CHW: Any, patch: int) -> Any:
    """Make channels of the cells of each patch, as `torch.pixel_unshuffle`: [..., C·P², H/P, W/P]."""
    if patch == 1:
        return latents_CHW
    *before, channels, height, width = latents_CHW.shape
    if height % patch or width % patch:
        raise ConfigError(f"normalize: {height}x{width} cells do not part into {patch}x{patch}")
    cells_CHPWP = latents_CHW.reshape(*before, channels, height // patch, patch, width // patch, patch)
    cells_CPPHW = cells_CHPWP.swapaxes(-4, -3).swapaxes(-3, -1).swapaxes(-2, -1)
    return cells_CPPHW.reshape(*before, channels * patch**2, height // patch, width // patch)


def spread(latents_CHW: Any, patch: int) -> Any:
    """Make a patch of cells of each cell's channels, as `torch.pixel_shuffle`: the inverse of `stacked`."""
    if patch == 1:
        return latents_CHW
    *before, channels, height, width = latents_CHW.shape
    cells_CPPHW = latents_CHW.reshape(*before, channels // patch**2, patch, patch, height, width)
    cells_CHPWP = cells_CPPHW.swapaxes(-2, -1).swapaxes(-3, -1).swapaxes(-4, -3)
    return cells_CHPWP.reshape(*before, channels // patch**2, height * patch, width * patch)
