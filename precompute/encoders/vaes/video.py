"""VAEs of other video models: of clips, or each image a video of one frame; folded, or as diffusers runs them."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from cache_store.format.array import ImageRecipe, Normalization
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.image_vaes import native_family
from precompute.encoders.vaes.kind import (
    DECODER,
    ENCODER,
    MEANS,
    ClipRule,
    Config,
    Prefix,
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


def ltx_clips(config: Config) -> ClipRule:
    """Encode the whole clip at once; layers are causal, and normalise each cell by itself."""
    scaling, kinds = config["spatio_temporal_scaling"], config["downsample_type"]
    halved = sum(halving and kind != "spatial" for halving, kind in zip(scaling, kinds, strict=False))
    factor = config["temporal_compression_ratio"] or config["patch_size_t"] * 2**halved
    if config["encoder_causal"]:
        return ClipRule(factor=factor, step=factor)
    return ClipRule(factor=factor, step=factor, prefix_of=lambda frames: (frames, 1 + (frames - 1) // factor))


def mochi_clips(config: Config) -> ClipRule:
    """Encode the whole clip at once; layers and attention are causal, and each frame is normalised by itself."""
    factor = prod(config["temporal_expansions"])
    return ClipRule(factor=factor, step=factor)


COGVIDEOX_BATCH = 8
"""Frames that diffusers' CogVideoX encodes at a time; the first time, one more."""


def cogvideox_clips(config: Config) -> ClipRule:
    """Encode nine frames, then eight at a time with the features of the last ones.

    Each batch is normalised as a whole, so that the first latent frame is not that of a still image. The decoder gives
    an even number of latent frames too many frames, so that a clip has 8k + 1.
    """
    return ClipRule(factor=config["temporal_compression_ratio"], step=COGVIDEOX_BATCH)


HUNYUAN_TILE, HUNYUAN_STRIDE = 16, 12
"""Frames of a tile in time without its first one, and from tile to tile; diffusers' defaults, which no config says."""


def hunyuan_clips(config: Config) -> ClipRule:
    """Encode tiles of 17 frames, the next one 12 frames on, and blend the latent frames that two tiles have in common.

    A tile is normalised as a whole, so that even the first latent frame is not that of a still image.
    """
    factor: int = config["temporal_compression_ratio"]

    def prefix_of(frames: int) -> Prefix:
        if frames <= HUNYUAN_TILE + 1:
            return frames, 1 + (frames - 1) // factor
        return HUNYUAN_TILE + 1, 1 + HUNYUAN_STRIDE // factor

    return ClipRule(factor=factor, step=factor, prefix_of=prefix_of)


def ltx_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `LTXImageToVideoPipeline._normalize_latents`, with means stored as weights."""
    means = {name: tuple(weights[name].tolist()) for name in MEANS}
    return config_normalization({**config, **means}, weights)


def cogvideox_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `CogVideoXVideoToVideoPipeline.prepare_latents`, which uses no means, does clips.

    An image that a video begins with is divided by the scale in CogVideoX 1.5 (`invert_scale_latents`), as in
    `CogVideoXImageToVideoPipeline.prepare_latents`.
    """
    scale = config["scaling_factor"]
    divides = config["invert_scale_latents"] and not is_clip
    return config_normalization({"scaling_factor": 1 / scale if divides else scale}, weights)


def video_kind(factor: Callable[[Config], int], config: tuple[str, ...], **more: Any) -> VaeKind:
    return VaeKind(spatial_factor=factor, encode_config=config, takes_frames=True, **more)


KINDS = {
    "AutoencoderKLHunyuanVideo": video_kind(
        stated_factor, (*HUNYUAN, "down_block_types", "act_fn", "norm_num_groups", "mid_block_add_attention"),
        clips=hunyuan_clips,
    ),
    "AutoencoderKLLTXVideo": video_kind(
        ltx_factor, LTX, encode_weights=ENCODER, decode_weights=DECODER, further_weights=MEANS,
        normalization=ltx_normalization, clips=ltx_clips,
    ),
    "AutoencoderKLLTX2Video": video_kind(
        ltx_2_factor, (*LTX, "encoder_spatial_padding_mode"), encode_weights=ENCODER, decode_weights=DECODER,
        further_weights=MEANS, normalization=ltx_normalization, clips=ltx_clips,
    ),
    "AutoencoderKLMochi": video_kind(
        mochi_factor, (*MOCHI, "temporal_expansions", "spatial_expansions", "add_attention_block"),
        encode_weights=ENCODER, decode_weights=DECODER, float32_until="fourier_features",
        clips=mochi_clips,
    ),
    "AutoencoderKLCogVideoX": video_kind(
        factor_of_levels("block_out_channels", (128, 256, 256, 512)),
        (*BLOCKS, "down_block_types", "act_fn", "norm_eps", "norm_num_groups", "use_quant_conv"),
        normalization=cogvideox_normalization, clips=cogvideox_clips,
    ),
}  # fmt: skip


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.vaes.diffusers_vae import load_native
    from precompute.encoders.vaes.folding import fold_still
    from precompute.encoders.vaes.vae import VaeEncoder

    kind, is_clip = KINDS[files.class_name], bool(image and image.clip)
    frozen = load_native(files, kind, config, fold_still if config.fold and not is_clip else None, is_clip=is_clip)
    return VaeEncoder(frozen, config, image)


FAMILY = replace(native_family(KINDS), load=load, takes=("posterior", "fold"), takes_clips=True)
