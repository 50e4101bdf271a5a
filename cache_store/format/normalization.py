"""Normalise latents as a VAE's diffusion models are trained on them, and undo it.

A cache holds latents as the VAE gives them. Its `encoder` records the normalisation (`Normalization`) in one form for
all VAEs. The result equals what the pipelines of diffusers compute, each in its own form:

    AutoencoderKL            (z - shift_factor) * scaling_factor          FluxImg2ImgPipeline._encode_vae_image
    AutoencoderKL with mean  (z - mean) * scaling_factor / std            StableDiffusionXLImg2ImgPipeline
    AutoencoderKLFlux2       (2x2 cells of z - mean) / sqrt(var + eps)    Flux2Pipeline._encode_vae_image
    AutoencoderKLWan         (z - mean) * (1 / std)                       WanImageToVideoPipeline.prepare_latents
    AutoencoderKLQwenImage   (z - mean) * (1 / std)                       QwenImageImg2ImgPipeline._encode_vae_image
    AutoencoderKLCosmos      (z - mean) * sigma_data / std                CosmosVideoToWorldPipeline.prepare_latents
    AutoencoderDC            z * scaling_factor                           SanaPipeline.__call__, inverted

Functions take numpy arrays and torch tensors, on any device, and return float32 of the same kind.
"""

# Axes: C channels, T latent frames, H W latent cells, P a patch's side; any axes before these.

from typing import Any, TypeVar

import numpy as np

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, Normalization

Samples = TypeVar("Samples")
"""A numpy array or a torch tensor."""


UNSTATED = Normalization(latents_mean=(), latents_std=())


def normalize(latents_CHW: Samples, by: Normalization, channel_axis: int = -3) -> Samples:
    """Map latents as a cache holds them to what a diffusion model is trained on.

    [..., C, H, W] becomes [..., C·P², H/P, W/P]; without patches, P is 1. `by` is the cache's encoder:
    `cache.spec.array.encoder`. Latents of clips, [..., C, T, H, W], need `channel_axis=-4`. Raises ConfigError for
    posterior moments, an own encoder without a normalisation, and another number of channels than the encoder's.
    """
    refuse_other_types(latents_CHW, by, channel_axis)
    refuse_moments(by)
    latents = stack_patches(as_float32(latents_CHW), by.latents_patch, channel_axis)
    if by.latents_shift is not None:
        latents = latents - by.latents_shift
    if by.latents_mean:
        latents = latents - per_channel(by.latents_mean, latents, channel_axis)
    if by.latents_scale is not None:
        latents = latents * by.latents_scale
    if by.latents_std:
        latents = latents / per_channel(by.latents_std, latents, channel_axis)
    return latents  # type: ignore[no-any-return]


def denormalize(latents_CHW: Samples, by: Normalization, channel_axis: int = -3) -> Samples:
    """Map a diffusion model's output back to a VAE decoder's input: the inverse of `normalize`."""
    refuse_other_types(latents_CHW, by, channel_axis)
    latents = as_float32(latents_CHW)
    if by.latents_std:
        latents = latents * per_channel(by.latents_std, latents, channel_axis)
    if by.latents_scale is not None:
        latents = latents / by.latents_scale
    if by.latents_mean:
        latents = latents + per_channel(by.latents_mean, latents, channel_axis)
    if by.latents_shift is not None:
        latents = latents + by.latents_shift
    return unstack_patches(latents, by.latents_patch, channel_axis)  # type: ignore[no-any-return]


def refuse_other_types(latents: object, by: object, channel_axis: object) -> None:
    if not isinstance(latents, np.ndarray) and not hasattr(latents, "new_tensor"):
        raise ConfigError(f"normalize: expected latents as an array or a tensor, got {type(latents).__name__}")
    if not isinstance(by, Normalization):
        raise ConfigError(f"normalize: expected `by` of a cache, cache.spec.array.encoder, got {type(by).__name__}")
    if not isinstance(channel_axis, int) or channel_axis >= 0:
        raise ConfigError(f"normalize: channel_axis is counted from the end: -3, or -4 for clips; got {channel_axis!r}")


def refuse_moments(by: Normalization) -> None:
    if isinstance(by, EncoderIdentity) and by.posterior == "moments":
        raise ConfigError(
            "normalize: the cache holds posterior moments; draw latents from them first, with "
            "LatentStream(…, normalize=True), or normalize the latents that you drew"
        )
    refuse_unstated(by)


def refuse_unstated(by: Normalization) -> None:
    if isinstance(by, EncoderIdentity) and ":" in by.class_name and drawn_normalization(by) == UNSTATED:
        raise ConfigError(
            f"normalize: {by.class_name} states no normalisation; normalize its samples yourself, or give the class "
            '`normalization = {"latents_scale": 1.0}`, or other fields of cache_store.format.array.Normalization, and '
            "build a new cache"
        )


def drawn_normalization(by: EncoderIdentity) -> Normalization:
    """Return the normalisation of latents drawn from a cache's posterior moments."""
    return Normalization(**{name: getattr(by, name) for name in Normalization.__struct_fields__})


def as_float32(samples: Any) -> Any:
    return samples.astype(np.float32) if isinstance(samples, np.ndarray) else samples.float()


def per_channel(values: tuple[float, ...], like: Any, channel_axis: int) -> Any:
    """Make an array [C, 1, 1], or [C, 1, 1, 1] for clips, of the same kind and on the same device as `like`."""
    if like.ndim < -channel_axis or like.shape[channel_axis] != len(values):
        raise ConfigError(
            f"normalize: the encoder has {len(values)} channels; axis {channel_axis} of {list(like.shape)} has others. "
            "Latents of clips, [..., channel, latent_t, latent_y, latent_x], need channel_axis=-4"
        )
    array = np.array(values, np.float32) if isinstance(like, np.ndarray) else like.new_tensor(values)
    return array.reshape(-1, *[1] * (-channel_axis - 1))


def stack_patches(latents: Any, patch: int, channel_axis: int) -> Any:
    """Turn the cells of each frame's patches into channels, like `torch.pixel_unshuffle`: [..., C·P², H/P, W/P]."""
    if patch == 1:
        return latents
    latents_CHW = latents.swapaxes(channel_axis, -3)
    *before, channels, height, width = latents_CHW.shape
    if height % patch or width % patch:
        raise ConfigError(f"normalize: {height}x{width} cells cannot be divided into patches of {patch}x{patch}")
    cells_CHPWP = latents_CHW.reshape(*before, channels, height // patch, patch, width // patch, patch)
    cells_CPPHW = cells_CHPWP.swapaxes(-4, -3).swapaxes(-3, -1).swapaxes(-2, -1)
    stacked_CHW = cells_CPPHW.reshape(*before, channels * patch**2, height // patch, width // patch)
    return stacked_CHW.swapaxes(channel_axis, -3)


def unstack_patches(latents: Any, patch: int, channel_axis: int) -> Any:
    """Turn each cell's channels into a patch of cells, like `torch.pixel_shuffle`: the inverse of `stack_patches`."""
    if patch == 1:
        return latents
    latents_CHW = latents.swapaxes(channel_axis, -3)
    *before, channels, height, width = latents_CHW.shape
    cells_CPPHW = latents_CHW.reshape(*before, channels // patch**2, patch, patch, height, width)
    cells_CHPWP = cells_CPPHW.swapaxes(-2, -1).swapaxes(-3, -1).swapaxes(-4, -3)
    cells_CHW = cells_CHPWP.reshape(*before, channels // patch**2, height * patch, width * patch)
    return cells_CHW.swapaxes(channel_axis, -3)
