"""The VAEs of diffusers that are served, each a line of `KINDS`; folded for still images, or as diffusers runs them.

The Wan 2.1 VAE is also that of Cosmos-Predict 2; in its residual form, with patches, `AutoencoderKLWan` is that of
Wan 2.2 and Cosmos 3. `AutoencoderKLQwenImage` is the first under another name. `AutoencoderKLQwenImage21` is the
residual form with 2-D convolutions, and its images have an alpha channel, which is opaque here.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.format.array import ImageRecipe, Normalization
from precompute.encoders.encoder import Encoder, Family, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.vaes.kind import (
    MEANS,
    ClipRule,
    Config,
    Prefix,
    VaeKind,
    config_normalization,
    factor_of_levels,
    stated_factor,
)

if TYPE_CHECKING:
    import torch

    from precompute.encoders.encoder import Decoder
    from precompute.encoders.model_files import ModelFiles

SIGMA_DATA = 0.5
"""The scheduler's value in Cosmos 1.0, whose pipelines multiply standardised latents by it."""

COGVIDEOX_BATCH = 8
"""Frames that diffusers' CogVideoX encodes at a time; the first time, one more."""

HUNYUAN_TILE, HUNYUAN_STRIDE = 16, 12
"""Frames of a tile in time without its first one, and from tile to tile: diffusers' defaults."""


def two_cells(config: Config) -> int:
    return 2


def cells_of_kl(config: Config) -> int:
    """Return 2 for a VAE of 16 channels: all diffusion models with one (FLUX.1, SD3, …) take 2x2 cells as one."""
    return 2 if config.get("latent_channels", 4) == 16 else 1


def wan_factor(config: Config, levels: tuple[int, ...]) -> int:
    return factor_of_levels("dim_mult", levels)(config) * (config.get("patch_size") or 1)


def ltx_factor(config: Config) -> int:
    halves = config.get("spatio_temporal_scaling", (True, True, True, False))
    kinds = config.get("downsample_type", ("conv",) * 4)
    halved = sum(halving and kind != "temporal" for halving, kind in zip(halves, kinds, strict=False))
    stated: int | None = config.get("spatial_compression_ratio")
    return stated or config.get("patch_size", 4) * 2**halved


def ltx_2_factor(config: Config) -> int:
    kinds = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    return ltx_factor({"spatio_temporal_scaling": (True,) * 4, "downsample_type": kinds, **config})


def mochi_factor(config: Config) -> int:
    return prod(config.get("spatial_expansions", (2, 2, 2)))


def flux2_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `Flux2Pipeline._encode_vae_image`: patchify, then (z - mean) / sqrt(var + eps)."""
    variance = weights["bn.running_var"].double() + config["batch_norm_eps"]
    return Normalization(
        latents_mean=tuple(weights["bn.running_mean"].tolist()),
        latents_std=tuple(variance.sqrt().tolist()),
        latents_patch=config["patch_size"][0],
    )


def cosmos_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `CosmosVideoToWorldPipeline.prepare_latents`, with the values of each first frame."""
    frames = {name: config[name][:: len(config[name]) // config["latent_channels"]] for name in MEANS if config[name]}
    return Normalization(
        latents_mean=tuple(frames.get("latents_mean", ())),
        latents_std=tuple(frames.get("latents_std", ())),
        latents_scale=SIGMA_DATA,
    )


def ltx_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `LTXImageToVideoPipeline._normalize_latents`, with means stored as weights."""
    means = {name: tuple(weights[name].tolist()) for name in MEANS}
    return config_normalization({**config, **means}, weights)


def cogvideox_normalization(config: Config, weights: Config, is_clip: bool) -> Normalization:
    """Normalise as diffusers' `prepare_latents`: CogVideoX 1.5 (`invert_scale_latents`) divides images by the scale."""
    scale = config["scaling_factor"]
    divides = config["invert_scale_latents"] and not is_clip
    return config_normalization({"scaling_factor": 1 / scale if divides else scale}, weights)


def wan_clips(config: Config) -> ClipRule:
    """Encode one frame, then four at a time with the features of the last ones."""
    return ClipRule(factor=2 ** sum(config["temperal_downsample"]), step=4)


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


def cogvideox_clips(config: Config) -> ClipRule:
    """Encode nine frames, then eight at a time with the features of the last ones.

    Each batch is normalised as a whole. Decoding an even number of latent frames gives too many, so a clip has 8k + 1.
    """
    return ClipRule(factor=config["temporal_compression_ratio"], step=COGVIDEOX_BATCH)


def hunyuan_clips(config: Config) -> ClipRule:
    """Encode tiles of 17 frames, each normalised as a whole, 12 frames apart, and blend their common latent frames."""
    factor: int = config["temporal_compression_ratio"]

    def prefix_of(frames: int) -> Prefix:
        if frames <= HUNYUAN_TILE + 1:
            return frames, 1 + (frames - 1) // factor
        return HUNYUAN_TILE + 1, 1 + HUNYUAN_STRIDE // factor

    return ClipRule(factor=factor, step=factor, prefix_of=prefix_of)


# Config values that encoding depends on, which are hashed.
KL_CONFIG = (
    *("in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels"),
    *("norm_num_groups", "use_quant_conv", "mid_block_add_attention"),
)
DC_CONFIG = (
    *("in_channels", "latent_channels", "attention_head_dim", "encoder_block_types", "encoder_block_out_channels"),
    *("encoder_layers_per_block", "encoder_qkv_multiscales", "downsample_block_type", "encoder_out_shortcut"),
)
TINY_CONFIG = ("in_channels", "encoder_block_out_channels", "act_fn", "latent_channels", "num_encoder_blocks")
COSMOS_CONFIG = (
    *("in_channels", "latent_channels", "encoder_block_out_channels", "attention_resolutions", "resolution"),
    *("num_layers", "patch_size", "patch_type", "spatial_compression_ratio", "temporal_compression_ratio"),
)
WAN_CONFIG = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample")
RESIDUAL_CONFIG = (*WAN_CONFIG, "is_residual", "in_channels", "patch_size")
BLOCKS = ("in_channels", "latent_channels", "block_out_channels", "layers_per_block")
HUNYUAN_CONFIG = (
    *(*BLOCKS, "spatial_compression_ratio", "temporal_compression_ratio", "down_block_types", "act_fn"),
    *("norm_num_groups", "mid_block_add_attention"),
)
LTX_CONFIG = (
    *(*BLOCKS, "down_block_types", "spatio_temporal_scaling", "downsample_type", "patch_size", "patch_size_t"),
    *("resnet_norm_eps", "encoder_causal"),
)
MOCHI_CONFIG = (
    *("in_channels", "latent_channels", "encoder_block_out_channels", "layers_per_block", "act_fn"),
    *("temporal_expansions", "spatial_expansions", "add_attention_block"),
)
COGVIDEOX_CONFIG = (*BLOCKS, "down_block_types", "act_fn", "norm_eps", "norm_num_groups", "use_quant_conv")

wan_kind = partial(VaeKind, channels="z_dim", needs_means=True, takes_frames=True, folds="wan")
video_kind = partial(VaeKind, takes_frames=True, folds="still")
ltx_kind = partial(
    video_kind, has_quant_conv=False, further_weights=MEANS, normalization=ltx_normalization, clips=ltx_clips
)

KINDS: dict[str, VaeKind] = {
    # SDXL's overflows in float16, so pipelines run it in float32; here it runs in bfloat16 or float32
    "AutoencoderKL": VaeKind(
        spatial_factor=factor_of_levels("block_out_channels", (64,)), cells=cells_of_kl, encode_config=KL_CONFIG
    ),
    "AutoencoderKLFlux2": VaeKind(
        spatial_factor=factor_of_levels("block_out_channels", (128, 256, 512, 512)),
        cells=two_cells,
        encode_config=KL_CONFIG,
        further_weights=("bn.",),
        normalization=flux2_normalization,
    ),
    "AutoencoderDC": VaeKind(
        spatial_factor=factor_of_levels("encoder_block_out_channels", (128, 256, 512, 512, 1024, 1024)),
        encode_config=DC_CONFIG,
        has_quant_conv=False,
        has_posterior=False,
    ),
    "AutoencoderTiny": VaeKind(
        spatial_factor=factor_of_levels("num_encoder_blocks", (1, 3, 3, 3)),
        encode_config=TINY_CONFIG,
        has_quant_conv=False,
        has_posterior=False,
    ),
    "AutoencoderKLWan": wan_kind(
        spatial_factor=partial(wan_factor, levels=(1, 2, 4, 4)), encode_config=RESIDUAL_CONFIG, clips=wan_clips
    ),
    "AutoencoderKLQwenImage": wan_kind(
        spatial_factor=partial(wan_factor, levels=(1, 2, 4, 4)),
        cells=two_cells,
        encode_config=(*WAN_CONFIG, "input_channels"),
    ),
    "AutoencoderKLQwenImage21": wan_kind(
        spatial_factor=partial(wan_factor, levels=(1, 2, 4, 8, 8)), cells=two_cells, encode_config=RESIDUAL_CONFIG
    ),
    "AutoencoderKLCosmos": video_kind(
        spatial_factor=stated_factor,
        encode_config=COSMOS_CONFIG,
        normalization=cosmos_normalization,
        has_posterior=False,
    ),
    "AutoencoderKLHunyuanVideo": video_kind(
        spatial_factor=stated_factor, encode_config=HUNYUAN_CONFIG, clips=hunyuan_clips
    ),
    "AutoencoderKLLTXVideo": ltx_kind(spatial_factor=ltx_factor, encode_config=LTX_CONFIG),
    "AutoencoderKLLTX2Video": ltx_kind(
        spatial_factor=ltx_2_factor, encode_config=(*LTX_CONFIG, "encoder_spatial_padding_mode")
    ),
    "AutoencoderKLMochi": video_kind(
        spatial_factor=mochi_factor,
        encode_config=MOCHI_CONFIG,
        has_quant_conv=False,
        float32_until="fourier_features",
        clips=mochi_clips,
    ),
    "AutoencoderKLCogVideoX": video_kind(
        spatial_factor=factor_of_levels("block_out_channels", (128, 256, 256, 512)),
        encode_config=COGVIDEOX_CONFIG,
        normalization=cogvideox_normalization,
        clips=cogvideox_clips,
    ),
}


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.vaes.vae import VaeEncoder

    kind, is_clip = KINDS[files.class_name], bool(image and image.clip)
    is_folded = bool(kind.folds) and config.fold and not is_clip
    if kind.folds == "wan" and is_folded:  # without diffusers, whose import adds seconds to the start of each worker
        from precompute.encoders.vaes.folded_wan import folded_wan

        return VaeEncoder(folded_wan(files, kind, config), config, image)
    if files.config.get("attn_scales"):
        setting = "clip" if is_clip else "encoder.fold: false"
        raise ConfigError(f"{setting} cannot run a model with attn_scales, diffusers' encode fails on them")
    from precompute.encoders.vaes.diffusers_vae import load_native
    from precompute.encoders.vaes.folding import fold_still

    frozen = load_native(files, kind, config, fold_still if is_folded else None, is_clip=is_clip)
    return VaeEncoder(frozen, config, image)


def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
    from precompute.encoders.vaes import diffusers_vae

    return diffusers_vae.load_decoder(files, KINDS[files.class_name], device)


def refuse_size(files: ModelFiles, height: int, width: int) -> None:
    refuse_cropping(height, width, KINDS[files.class_name].multiple(files.config))


def family_of(class_name: str) -> Family:
    kind = KINDS[class_name]
    used = {"posterior": kind.has_posterior, "fold": kind.folds, "compile": kind.folds == "wan"}
    takes = tuple(name for name, is_used in used.items() if is_used)
    takes_clips = kind.clips is not None
    return Family(load=load, refuse_size=refuse_size, takes=takes, load_decoder=load_decoder, takes_clips=takes_clips)
