"""VAEs of other video models, each image a video of one frame: folded, or as diffusers runs them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cache_store.format.array import Normalization
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.image_vaes import native_family
from precompute.encoders.vaes.kind import (
    DECODER,
    ENCODER,
    MEANS,
    Config,
    VaeKind,
    config_normalization,
    factor_of_levels,
    stated_factor,
)

BLOCKS = ("in_channels", "latent_channels", "block_out_channels", "layers_per_block")
HUNYUAN = (*BLOCKS, "spatial_compression_ratio", "temporal_compression_ratio")
LTX = (
    *BLOCKS,
    "down_block_types",
    "spatio_temporal_scaling",
    "downsample_type",
    "patch_size",
    "patch_size_t",
    "resnet_norm_eps",
    "encoder_causal",
)
MOCHI = ("in_channels", "latent_channels", "encoder_block_out_channels", "layers_per_block", "act_fn")


def ltx_factor(config: Config) -> int:
    """Return the config's stated factor, or else compute it from patches and from halvings between levels."""
    halves = config.get("spatio_temporal_scaling", (True, True, True, False))
    kinds = config.get("downsample_type", ("conv",) * 4)
    halved = sum(halving and kind != "temporal" for halving, kind in zip(halves, kinds, strict=False))
    stated: int | None = config.get("spatial_compression_ratio")
    return stated or config.get("patch_size", 4) * 2**halved


def ltx_2_factor(config: Config) -> int:
    kinds = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    return ltx_factor({"spatio_temporal_scaling": (True,) * 4, "downsample_type": kinds, **config})


def mochi_factor(config: Config) -> int:
    factor = 1
    for times in config.get("spatial_expansions", (2, 2, 2)):
        factor *= times
    return factor


def ltx_normalization(config: Config, weights: Config) -> Normalization:
    """Normalise as diffusers' `LTXImageToVideoPipeline._normalize_latents`, with means stored as weights."""
    means = {name: tuple(weights[name].tolist()) for name in MEANS}
    return config_normalization({**config, **means}, weights)


def cogvideox_normalization(config: Config, weights: Config) -> Normalization:
    """Normalise as diffusers' `CogVideoXImageToVideoPipeline.prepare_latents`, which uses no means."""
    scale = config["scaling_factor"]
    return config_normalization({"scaling_factor": 1 / scale if config["invert_scale_latents"] else scale}, weights)


def video_kind(factor: Callable[[Config], int], config: tuple[str, ...], **more: Any) -> VaeKind:
    return VaeKind(spatial_factor=factor, encode_config=config, takes_frames=True, **more)


KINDS = {
    "AutoencoderKLHunyuanVideo": video_kind(
        stated_factor, (*HUNYUAN, "down_block_types", "act_fn", "norm_num_groups", "mid_block_add_attention")
    ),
    "AutoencoderKLLTXVideo": video_kind(
        ltx_factor, LTX, encode_weights=ENCODER, decode_weights=DECODER, further_weights=MEANS,
        normalization=ltx_normalization,
    ),
    "AutoencoderKLLTX2Video": video_kind(
        ltx_2_factor, (*LTX, "encoder_spatial_padding_mode"), encode_weights=ENCODER, decode_weights=DECODER,
        further_weights=MEANS, normalization=ltx_normalization,
    ),
    "AutoencoderKLMochi": video_kind(
        mochi_factor, (*MOCHI, "temporal_expansions", "spatial_expansions", "add_attention_block"),
        encode_weights=ENCODER, decode_weights=DECODER, float32_until="fourier_features",
    ),
    "AutoencoderKLCogVideoX": video_kind(
        factor_of_levels("block_out_channels", (128, 256, 256, 512)),
        (*BLOCKS, "down_block_types", "act_fn", "norm_eps", "norm_num_groups", "use_quant_conv"),
        normalization=cogvideox_normalization,
    ),
}  # fmt: skip


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.vaes.diffusers_vae import load_native
    from precompute.encoders.vaes.folding import fold_still
    from precompute.encoders.vaes.vae import VaeEncoder

    frozen = load_native(files, KINDS[files.class_name], config, fold_still if config.fold else None)
    return VaeEncoder(frozen, config, pixel_range)


FAMILY = replace(native_family(KINDS), load=load, takes=("posterior", "fold"))
