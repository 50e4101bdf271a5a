"""`AutoencoderKLFlux2`, of FLUX.2: 2-D, as diffusers runs it.

Its transformer sees 2x2 cells of a latent as one, normalised by a BatchNorm's statistics.
"""

from cache_store.format.schema import Normalization
from precompute.encoders.vaes.kind import Config, VaeKind, halvings
from precompute.encoders.vaes.native import native_family

ENCODE_CONFIG = (
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


def spatial_factor(config: Config) -> int:
    return halvings(config, "block_out_channels", (128, 256, 512, 512))


def patched(config: Config, weights: Config) -> Normalization:
    """As diffusers' `Flux2Pipeline._encode_vae_image`: `_patchify_latents`, then (z - mean) / sqrt(var + eps)."""
    variance = weights["bn.running_var"].double() + config["batch_norm_eps"]
    return Normalization(
        latents_mean=tuple(weights["bn.running_mean"].tolist()),
        latents_std=tuple(variance.sqrt().tolist()),
        latents_patch=config["patch_size"][0],
    )


KIND = VaeKind(
    spatial_factor=spatial_factor,
    cells=2,
    encode_config=ENCODE_CONFIG,
    further_weights=("bn.",),
    normalization=patched,
)

FAMILY = native_family({"AutoencoderKLFlux2": KIND})
