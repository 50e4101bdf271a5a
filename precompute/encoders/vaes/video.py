"""VAEs of other video models, each image a video of one frame: folded, or as diffusers runs them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cache_store.format.array import Normalization
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.image_vaes import native_family
from precompute.encoders.vaes.kind import Config, VaeKind, halvings, scaled

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
PLAIN = ("encoder.",)
MEANS = ("latents_mean", "latents_std")


def hunyuan_factor(config: Config) -> int:
    factor: int = config.get("spatial_compression_ratio", 8)
    return factor


def ltx_factor(config: Config) -> int:
    """Patches, and what each halving between levels halves; a config may say what they come to."""
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


def cogvideox_factor(config: Config) -> int:
    return halvings(config, "block_out_channels", (128, 256, 256, 512))


def of_weights(config: Config, weights: Config) -> Normalization:
    """As diffusers' `LTXImageToVideoPipeline._normalize_latents`, whose means lie among the weights."""
    means = {name: tuple(weights[name].tolist()) for name in MEANS}
    return scaled({**config, **means}, weights)


def inverted(config: Config, weights: Config) -> Normalization:
    """As diffusers' `CogVideoXImageToVideoPipeline.prepare_latents`, which knows no means."""
    scale = config["scaling_factor"]
    return scaled({"scaling_factor": 1 / scale if config["invert_scale_latents"] else scale}, weights)


def video_kind(factor: Callable[[Config], int], config: tuple[str, ...], **more: Any) -> VaeKind:
    return VaeKind(spatial_factor=factor, encode_config=config, takes_frames=True, **more)


KINDS = {
    "AutoencoderKLHunyuanVideo": video_kind(
        hunyuan_factor, (*HUNYUAN, "down_block_types", "act_fn", "norm_num_groups", "mid_block_add_attention")
    ),
    "AutoencoderKLLTXVideo": video_kind(
        ltx_factor, LTX, encode_weights=PLAIN, decode_weights=("decoder.",), further_weights=MEANS,
        normalization=of_weights,
    ),
    "AutoencoderKLLTX2Video": video_kind(
        ltx_2_factor, (*LTX, "encoder_spatial_padding_mode"), encode_weights=PLAIN, decode_weights=("decoder.",),
        further_weights=MEANS, normalization=of_weights,
    ),
    "AutoencoderKLMochi": video_kind(
        mochi_factor, (*MOCHI, "temporal_expansions", "spatial_expansions", "add_attention_block"),
        encode_weights=PLAIN, decode_weights=("decoder.",), float32_until="fourier_features",
    ),
    "AutoencoderKLCogVideoX": video_kind(
        cogvideox_factor, (*BLOCKS, "down_block_types", "act_fn", "norm_eps", "norm_num_groups", "use_quant_conv"),
        normalization=inverted,
    ),
}  # fmt: skip


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.vaes.diffusers_vae import load_native
    from precompute.encoders.vaes.folding import fold_still
    from precompute.encoders.vaes.vae import VaeEncoder

    frozen = load_native(files, KINDS[files.class_name], config, fold_still if config.fold else None)
    return VaeEncoder(frozen, config, pixel_range)


FAMILY = replace(native_family(KINDS), load=load, takes=("posterior", "fold"))
