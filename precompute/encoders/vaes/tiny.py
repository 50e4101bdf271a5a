"""`AutoencoderTiny`, TAESD and its kin, each distilled from a large VAE: without a posterior, as diffusers runs it."""

from precompute.encoders.vaes.kind import Config, VaeKind, halvings
from precompute.encoders.vaes.native import native_family


def spatial_factor(config: Config) -> int:
    return halvings(config, "num_encoder_blocks", (1, 3, 3, 3))


ENCODE_CONFIG = ("in_channels", "encoder_block_out_channels", "act_fn", "latent_channels", "num_encoder_blocks")

KIND = VaeKind(
    spatial_factor=spatial_factor,
    encode_config=ENCODE_CONFIG,
    encode_weights=("encoder.",),
    decode_weights=("decoder.",),
    has_posterior=False,
)

FAMILY = native_family({"AutoencoderTiny": KIND})
