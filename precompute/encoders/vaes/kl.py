"""`AutoencoderKL`, of Stable Diffusion, SDXL, SD3, FLUX.1 and many others: 2-D, as diffusers runs it.

SDXL's overflows in float16, so that pipelines compute it in float32 (`force_upcast`); here it is bfloat16 or float32.
"""

from precompute.encoders.vaes.kind import Config, VaeKind, halvings
from precompute.encoders.vaes.native import native_family


def spatial_factor(config: Config) -> int:
    return halvings(config, "block_out_channels", (64,))


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

KIND = VaeKind(spatial_factor=spatial_factor, encode_config=ENCODE_CONFIG)

FAMILY = native_family({"AutoencoderKL": KIND})
