"""How one class of diffusers' VAEs differs from another; nothing here imports torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cache_store.errors import ModelError
from cache_store.format.array import Normalization
from precompute.encoders.model_files import ModelFiles

Config = Mapping[str, Any]
"""A model's config.json, or with diffusers' defaults for what that leaves out."""


def scaled(config: Config, weights: Config) -> Normalization:
    """As most pipelines normalise: by what the config says of it; null stands for nothing."""
    scale = config.get("scaling_factor")
    return Normalization(
        latents_mean=tuple(config.get("latents_mean") or ()),
        latents_std=tuple(config.get("latents_std") or ()),
        latents_shift=config.get("shift_factor") or None,
        latents_scale=None if scale == 1 else scale,
    )


def rgb(config: Config) -> int:
    return 3


@dataclass(frozen=True, kw_only=True)
class VaeKind:
    """A class of diffusers' VAEs."""

    spatial_factor: Callable[[Config], int]
    """Pixels of a latent cell's side, by config.json alone."""
    cells: int = 1
    """A latent's sides are multiples of so many cells."""
    encode_config: tuple[str, ...]
    """Config values that encoding depends on."""
    channels: str = "latent_channels"
    """The config value that counts a latent's channels."""
    encode_weights: tuple[str, ...] = ("encoder.", "quant_conv.")
    """How the names of weights begin that encoding depends on."""
    decode_weights: tuple[str, ...] = ("decoder.", "post_quant_conv.")
    further_weights: tuple[str, ...] = ()
    """Needed as well: for the normalisation."""
    normalization: Callable[[Config, Config], Normalization] = scaled
    """Reads it from the config, with all defaults, and from the weights by name."""
    needs_means: bool = False
    """Whether a mean and a deviation of each latent channel belong to a config."""
    has_posterior: bool = True
    takes_frames: bool = False
    """Whether an image enters as a video of one frame."""
    float32_until: str = ""
    """The part of the encoder that pixels enter in float32, whatever the dtype: else rounding would be multiplied."""
    pixel_channels: Callable[[Config], int] = rgb
    """4 where an image has an alpha channel."""


def halvings(config: Config, key: str, default: tuple[Any, ...]) -> int:
    """The spatial factor of a VAE that halves its sides between levels, of which `key` has an entry each."""
    factor: int = 2 ** (len(config.get(key, default)) - 1)
    return factor


def refuse_other_lengths(files: ModelFiles, kind: VaeKind, normalization: Normalization, channels: int) -> None:
    """Raise ModelError unless there are a mean and a deviation for every latent channel, or none."""
    wanted = channels * normalization.latents_patch**2
    lengths = {name: len(getattr(normalization, name)) for name in ("latents_mean", "latents_std")}
    for name, length in lengths.items():
        if length != wanted and (kind.needs_means or any(lengths.values())):
            raise ModelError(
                f"encoder.model {files.model} has {length} values of {name} for {wanted} latent"
                f" channels; write {wanted} into its config.json"
            )
