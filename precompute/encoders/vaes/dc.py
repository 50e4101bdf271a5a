"""`AutoencoderDC`, of SANA and others: 2-D, 32 times smaller or more, without a posterior, as diffusers runs it."""

from precompute.encoders.vaes.kind import Config, VaeKind, halvings
from precompute.encoders.vaes.native import native_family


def spatial_factor(config: Config) -> int:
    return halvings(config, "encoder_block_out_channels", (128, 256, 512, 512, 1024, 1024))


ENCODE_CONFIG = (
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

KIND = VaeKind(
    spatial_factor=spatial_factor,
    encode_config=ENCODE_CONFIG,
    encode_weights=("encoder.",),
    decode_weights=("decoder.",),
    has_posterior=False,
)

FAMILY = native_family({"AutoencoderDC": KIND})
