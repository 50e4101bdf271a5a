"""What diffusers itself runs of an `AutoencoderKLWan`: the decoder, for looking at latents, and the unfolded encoder.

diffusers only warns of weights that a checkpoint lacks and leaves them unset; here a missing or unknown weight of a
path that is needed is an error. Weights are read from safetensors alone, never from pickles.
"""

# Axes: N images, C latent channels, H W latent cells, Y X pixels, 3 RGB.

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.utils import logging
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, quiet, refuse_partial
from precompute.encoders.vaes.wan_files import ENCODE_PATH, WEIGHTS, encode_path_sha256, wan_config
from precompute.encoders.weight_files import loading, refuse_damaged

DECODE_PATH = {"decode path": ("decoder.", "post_quant_conv.")}


def read_whole_vae(files: ModelFiles, needed: Mapping[str, tuple[str, ...]]) -> Any:
    """The model in float32, frozen; ModelError when anything of the paths needed is wrong."""
    with quiet(logging), loading(files):
        refuse_damaged(files, WEIGHTS)
        vae, report = AutoencoderKLWan.from_pretrained(
            files.model,
            subfolder=files.subfolder or None,
            torch_dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, too
            low_cpu_mem_usage=False,  # else diffusers raises for them, and advises to leave them random
        )
    for path, prefixes in needed.items():
        refuse_partial(files, report, path, prefixes)
    return vae.requires_grad_(False).eval()


def native_moments(vae: Any, config: EncoderConfig) -> Callable[[Tensor], Tensor]:
    """The path of diffusers itself, each image a video of one frame."""
    if vae.config.attn_scales:
        raise ConfigError("encoder.fold: false cannot run a model with attn_scales, diffusers' encode fails on them")
    with quiet(logging):
        vae = vae.to(config.torch_device, config.torch_dtype)

    def moments(image_N3YX: Tensor) -> Tensor:
        posterior = vae.encode(image_N3YX.contiguous().unsqueeze(2)).latent_dist
        return posterior.parameters.squeeze(2)  # type: ignore[no-any-return]

    return moments


def load_wan_decoder(files: ModelFiles, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    """The decoder, and the SHA-256 of the encode path that its weights came with.

    It maps posterior means as the encoder gives them, not standardised, [N, C, H, W], to RGB in [-1, 1],
    [N, 3, Y, X]; in float32, one image at a time, since on a CPU a decoder's activations are large.
    """
    vae = read_whole_vae(files, ENCODE_PATH | DECODE_PATH)
    with loading(files):
        held = wan_config(files)
    digest = encode_path_sha256(files, held, vae.state_dict())
    vae.encoder = vae.quant_conv = None
    with quiet(logging):
        vae = vae.to(device)

    @torch.inference_mode()
    def decode(latent_NCHW: Tensor) -> Tensor:
        frames_1CTHW = torch.split(latent_NCHW.to(device, torch.float32).unsqueeze(2), 1)
        return torch.cat([vae.decode(frame_1CTHW).sample.squeeze(2) for frame_1CTHW in frames_1CTHW])

    return decode, digest
