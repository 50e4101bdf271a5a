"""2-D VAEs as diffusers runs them: those of Stable Diffusion, FLUX.1, FLUX.2 and SANA, and tiny distilled ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cache_store.format.array import ImageRecipe, Normalization
from precompute.encoders.encoder import Encoder, Family, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.kind import DECODER, ENCODER, Config, VaeKind, factor_of_levels, two_cells

if TYPE_CHECKING:
    import torch

    from precompute.encoders.encoder import Decoder

KL_CONFIG = (
    "in_channels",
    "down_block_types",
    "block_out_channels",
    "layers_per_block",
    "act_fn",
    "latent_channels",
    "norm_num_groups",
    "use_quant_conv",
    "mid_block_add_attention",
)


def native_family(kinds: Mapping[str, VaeKind]) -> Family:
    """Make the family of these kinds, given by class."""

    def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
        from precompute.encoders.vaes.diffusers_vae import load_native
        from precompute.encoders.vaes.vae import VaeEncoder

        return VaeEncoder(load_native(files, kinds[files.class_name], config), config, image)

    def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
        from precompute.encoders.vaes import diffusers_vae

        return diffusers_vae.load_decoder(files, kinds[files.class_name], device)

    def refuse_size(config: Config, height: int, width: int) -> None:
        refuse_cropping(height, width, kinds[config["_class_name"]].multiple(config))

    takes = ("posterior",) if any(kind.has_posterior for kind in kinds.values()) else ()
    return Family(load=load, refuse_size=refuse_size, takes=takes, load_decoder=load_decoder)


def cells_of_kl(config: Config) -> int:
    """Return 2 for a VAE of 16 channels: all diffusion models that have one (FLUX.1, SD3, …) take 2x2 cells as one."""
    return 2 if config.get("latent_channels", 4) == 16 else 1


KL = native_family(
    {
        "AutoencoderKL": VaeKind(
            spatial_factor=factor_of_levels("block_out_channels", (64,)), cells=cells_of_kl, encode_config=KL_CONFIG
        )
    }
)
"""The VAE of Stable Diffusion, SDXL, SD3, FLUX.1 and many others.

SDXL's VAE overflows in float16, so pipelines run it in float32 (`force_upcast`); here it runs in bfloat16 or float32.
"""


def flux2_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `Flux2Pipeline._encode_vae_image`: patchify, then (z - mean) / sqrt(var + eps)."""
    variance = weights["bn.running_var"].double() + config["batch_norm_eps"]
    return Normalization(
        latents_mean=tuple(weights["bn.running_mean"].tolist()),
        latents_std=tuple(variance.sqrt().tolist()),
        latents_patch=config["patch_size"][0],
    )


FLUX2 = native_family(
    {
        "AutoencoderKLFlux2": VaeKind(
            spatial_factor=factor_of_levels("block_out_channels", (128, 256, 512, 512)),
            cells=two_cells,
            encode_config=KL_CONFIG,
            further_weights=("bn.",),
            normalization=flux2_normalization,
        )
    }
)
"""The VAE of FLUX.2, whose transformer takes 2x2 cells as one, normalised by a BatchNorm's statistics."""


DC_CONFIG = (
    "in_channels",
    "latent_channels",
    "attention_head_dim",
    "encoder_block_types",
    "encoder_block_out_channels",
    "encoder_layers_per_block",
    "encoder_qkv_multiscales",
    "downsample_block_type",
    "encoder_out_shortcut",
)

DC = native_family(
    {
        "AutoencoderDC": VaeKind(
            spatial_factor=factor_of_levels("encoder_block_out_channels", (128, 256, 512, 512, 1024, 1024)),
            encode_config=DC_CONFIG,
            encode_weights=ENCODER,
            decode_weights=DECODER,
            has_posterior=False,
        )
    }
)
"""The autoencoder of SANA and others: 32 times smaller or more, without a posterior."""


TINY_CONFIG = ("in_channels", "encoder_block_out_channels", "act_fn", "latent_channels", "num_encoder_blocks")

TINY = native_family(
    {
        "AutoencoderTiny": VaeKind(
            spatial_factor=factor_of_levels("num_encoder_blocks", (1, 3, 3, 3)),
            encode_config=TINY_CONFIG,
            encode_weights=ENCODER,
            decode_weights=DECODER,
            has_posterior=False,
        )
    }
)
"""TAESD and other autoencoders distilled from a large VAE, without a posterior."""
