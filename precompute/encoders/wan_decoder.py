"""The decoder of Wan 2.1 and Cosmos-Predict2, by diffusers itself: for looking at latents, never for making them."""

# Axes: N images, C latent channels, H W latent cells, Y X pixels, 3 RGB.

from collections.abc import Callable

import torch
from diffusers.utils import logging
from torch import Tensor

from precompute.encoders.model_files import ModelFiles, quiet
from precompute.encoders.wan import ENCODE_PATH, encode_path_sha256, read_whole_vae

DECODE_PATH = {"decode path": ("decoder.", "post_quant_conv.")}


def load_wan_decoder(files: ModelFiles, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    """The decoder, and the SHA-256 of the encode path that its weights came with.

    It maps posterior means as the encoder gives them, not standardised, [N, C, H, W], to RGB in [-1, 1],
    [N, 3, Y, X]; in float32, one image at a time, since on a CPU a decoder's activations are large.
    """
    vae = read_whole_vae(files, ENCODE_PATH | DECODE_PATH)
    digest = encode_path_sha256(files, vae)
    vae.encoder = vae.quant_conv = None
    with quiet(logging):
        vae = vae.to(device)

    @torch.inference_mode()
    def decode(latent_NCHW: Tensor) -> Tensor:
        frames_1CTHW = torch.split(latent_NCHW.to(device, torch.float32).unsqueeze(2), 1)
        return torch.cat([vae.decode(frame_1CTHW).sample.squeeze(2) for frame_1CTHW in frames_1CTHW])

    return decode, digest
