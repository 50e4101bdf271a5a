"""Wan-like VAEs: folded for still images, or as diffusers runs them.

`AutoencoderKLWan` is the VAE of Wan 2.1 and Cosmos-Predict 2, and in its residual form, with patches, that of Wan 2.2
and Cosmos 3. `AutoencoderKLQwenImage` is the first under another name. `AutoencoderKLQwenImage21` is the residual form
with 2-D convolutions, and its images have an alpha channel, which is opaque here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.format.array import ImageRecipe
from precompute.encoders.encoder import Encoder, Family, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.kind import ClipRule, Config, VaeKind, factor_of_levels, one_cell, two_cells

if TYPE_CHECKING:
    import torch

    from precompute.encoders.encoder import Decoder
    from precompute.encoders.vaes.vae import FrozenVae


def wan_clips(config: Config) -> ClipRule:
    """Encode one frame, then four at a time with the features of the last ones; the prefix of a clip is exact."""
    return ClipRule(factor=2 ** sum(config["temperal_downsample"]), step=4)


def wan_kind(
    levels: tuple[int, ...],
    *further: str,
    cells: Callable[[Config], int] = one_cell,
    clips: Callable[[Config], ClipRule] | None = None,
) -> VaeKind:
    """Describe a class whose `dim_mult` is by default `levels`; `further` are config values of this class alone."""
    halved = factor_of_levels("dim_mult", levels)

    def spatial_factor(config: Config) -> int:
        """Return a latent cell's side in pixels: doubled between levels, and multiplied by the side of patches."""
        return halved(config) * (config.get("patch_size") or 1)

    return VaeKind(
        spatial_factor=spatial_factor,
        cells=cells,
        encode_config=(*COMMON_CONFIG, *further),
        channels="z_dim",
        needs_means=True,
        takes_frames=True,
        clips=clips,
        pixel_channels=pixel_channels,
    )


def pixel_channels(config: Config) -> int:
    channels: int = config.get("in_channels", 3) // (config.get("patch_size") or 1) ** 2
    return channels


COMMON_CONFIG = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample")
RESIDUAL_CONFIG = ("is_residual", "in_channels", "patch_size")

KINDS = {
    "AutoencoderKLWan": wan_kind((1, 2, 4, 4), *RESIDUAL_CONFIG, clips=wan_clips),
    "AutoencoderKLQwenImage": wan_kind((1, 2, 4, 4), "input_channels", cells=two_cells),
    "AutoencoderKLQwenImage21": wan_kind((1, 2, 4, 8, 8), *RESIDUAL_CONFIG, cells=two_cells),
}


def refuse_size(config: Config, height: int, width: int) -> None:
    refuse_cropping(height, width, KINDS[config["_class_name"]].multiple(config))


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.vaes.vae import VaeEncoder

    if image and image.clip:
        return VaeEncoder(load_unfolded(files, config, "clip", is_clip=True), config, image)
    frozen = load_folded(files, config) if config.fold else load_unfolded(files, config, "encoder.fold: false")
    return VaeEncoder(frozen, config, image)


def load_folded(files: ModelFiles, config: EncoderConfig) -> FrozenVae:
    """Load the folded encode path without diffusers, whose import adds seconds to the start of each worker."""
    from precompute.encoders.vaes.folded_wan import folded_wan

    return folded_wan(files, KINDS[files.class_name], config)


def load_unfolded(files: ModelFiles, config: EncoderConfig, setting: str, *, is_clip: bool = False) -> FrozenVae:
    from precompute.encoders.vaes import diffusers_vae

    refuse_attention(files, setting)
    return diffusers_vae.load_native(files, KINDS[files.class_name], config, is_clip=is_clip)


def refuse_attention(files: ModelFiles, setting: str) -> None:
    """Raise ConfigError for a model that only the folded path runs."""
    if files.config.get("attn_scales"):
        raise ConfigError(f"{setting} cannot run a model with attn_scales, diffusers' encode fails on them")


def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
    from precompute.encoders.vaes import diffusers_vae

    return diffusers_vae.load_decoder(files, KINDS[files.class_name], device)


FAMILY = Family(
    load=load,
    refuse_size=refuse_size,
    takes=("posterior", "fold", "compile"),
    load_decoder=load_decoder,
    takes_clips=True,
)
