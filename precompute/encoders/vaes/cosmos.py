"""`AutoencoderKLCosmos`, of Cosmos 1.0: folded for still images, or as diffusers runs it; without a posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_store.format.array import ImageRecipe, Normalization
from precompute.encoders.encoder import Encoder, Family, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.kind import MEANS, Config, VaeKind, stated_factor

if TYPE_CHECKING:
    import torch

    from precompute.encoders.encoder import Decoder

COSMOS_CONFIG = (
    "in_channels",
    "latent_channels",
    "encoder_block_out_channels",
    "attention_resolutions",
    "resolution",
    "num_layers",
    "patch_size",
    "patch_type",
    "spatial_compression_ratio",
    "temporal_compression_ratio",
)

SIGMA_DATA = 0.5
"""The scheduler's value in Cosmos 1.0, whose pipelines multiply standardised latents by it."""


def cosmos_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `CosmosVideoToWorldPipeline.prepare_latents`, with the values of each first frame."""
    frames = {name: config[name][:: len(config[name]) // config["latent_channels"]] for name in MEANS if config[name]}
    return Normalization(
        latents_mean=tuple(frames.get("latents_mean", ())),
        latents_std=tuple(frames.get("latents_std", ())),
        latents_scale=SIGMA_DATA,
    )


KIND = VaeKind(
    spatial_factor=stated_factor,
    encode_config=COSMOS_CONFIG,
    normalization=cosmos_normalization,
    has_posterior=False,
    takes_frames=True,
)


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.vaes.diffusers_vae import load_native
    from precompute.encoders.vaes.folding import fold_still
    from precompute.encoders.vaes.vae import VaeEncoder

    return VaeEncoder(load_native(files, KIND, config, fold_still if config.fold else None), config, image)


def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
    from precompute.encoders.vaes import diffusers_vae

    return diffusers_vae.load_decoder(files, KIND, device)


def refuse_size(config: Config, height: int, width: int) -> None:
    refuse_cropping(height, width, stated_factor(config))


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("fold",), load_decoder=load_decoder)
