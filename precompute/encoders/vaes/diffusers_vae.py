"""VAEs as diffusers itself runs them: the encoder, and the decoder to view latents.

Diffusers only warns about missing weights and leaves them unset; here a missing or unknown weight of a needed path is
an error.
"""

# Axes: N images, C latent channels, H W latent cells, T frames, Y X pixels, 3 RGB.

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.utils import logging
from torch import Tensor

from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, refuse_incomplete, silence_library
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.vaes.vae import FrozenVae, Network, add_alpha, split_batches
from precompute.encoders.weights import DIFFUSERS_FILES, model_errors, refuse_unusable, weights_sha256

Fold = Callable[[torch.nn.Module, torch.dtype], None]
"""Replaces layers of an encoder with layers for still images, in a dtype."""


def read_whole_vae(files: ModelFiles, needed: Mapping[str, tuple[str, ...]]) -> Any:
    """Load the model in float32, frozen; ModelError if a needed path is not whole."""
    with silence_library(logging), model_errors(files):
        refuse_unusable(files, DIFFUSERS_FILES)
        vae, report = getattr(diffusers, files.class_name).from_pretrained(
            files.model,
            subfolder=files.subfolder or None,
            torch_dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported
            low_cpu_mem_usage=False,  # otherwise diffusers raises, and advises to leave them random
        )
    for path, prefixes in needed.items():
        refuse_incomplete(files, report, path, prefixes)
    return vae.requires_grad_(False).eval()


def load_native(
    files: ModelFiles, kind: VaeKind, config: EncoderConfig, fold: Fold | None = None, *, is_clip: bool = False
) -> FrozenVae:
    """Load the encode path, run by diffusers, perhaps with layers replaced by `fold`."""
    vae = read_whole_vae(files, {"encode path": kind.encode_weights + kind.further_weights})
    free_weights(vae, kind.decode_weights)
    with model_errors(files):
        weights = vae.state_dict()
        digest = encode_path_sha256(files, kind, vae.config, weights)  # before these are rounded in place
        normalization = kind.normalization(vae.config, weights, is_clip)
        refuse_other_lengths(files, kind, normalization, vae.config[kind.channels])
    if fold is not None:
        fold(vae.encoder, config.torch_dtype)
    on_cpu = config.torch_device.type == "cpu"
    network = native_network(vae, kind, config)
    return FrozenVae(
        network=split_batches(network) if on_cpu else network,
        class_name=files.class_name,
        weights_sha256=digest,
        kind=kind,
        config=vae.config,
        normalization=normalization,
        is_folded=fold is not None,
        clips=kind.clips(vae.config) if kind.clips and is_clip else None,
    )


def free_weights(vae: Any, weights: tuple[str, ...]) -> None:
    """Free a path's weights, but keep empty modules: some classes count their contents."""
    for name in weights:
        setattr(vae, name.removesuffix("."), torch.nn.Module())


def encode_path_sha256(
    files: ModelFiles, kind: VaeKind, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> str:
    chosen = ((name, weight) for name, weight in weights.items() if name.startswith(kind.encode_weights))
    return weights_sha256(files.class_name, config, kind.encode_config, chosen)


def native_network(vae: Any, kind: VaeKind, config: EncoderConfig) -> Network:
    """Make diffusers' own encode path; an image may enter as a video of one frame.

    Diffusers encodes a clip in its own way: Wan in chunks of four frames with a cache, CogVideoX in eight with a cache,
    HunyuanVideo in blended tiles of 16 frames, LTX and Mochi whole. Tiling over height and width, which diffusers
    leaves off, stays off: it changes Wan's latents by 41 % of their root mean square.
    """
    assert not getattr(vae, "use_tiling", False)  # not every class can tile
    has_alpha = kind.takes_frames and vae.config.get("in_channels") == 4 * (vae.config.get("patch_size") or 1) ** 2
    with silence_library(logging):
        vae = vae.to(config.torch_device, config.torch_dtype)
    if kind.float32_until:
        first = vae.encoder.get_submodule(kind.float32_until)
        first.register_forward_hook(lambda _, __, made: made.to(config.torch_dtype))

    def network(image_N3YX: Tensor) -> Tensor:
        entering = (add_alpha(image_N3YX) if has_alpha else image_N3YX).contiguous()
        is_still = kind.takes_frames and entering.dim() == 4
        (encoded,) = vae.encode(entering.unsqueeze(2) if is_still else entering, return_dict=False)
        latents: Tensor = encoded if isinstance(encoded, Tensor) else encoded.parameters
        return latents.squeeze(2) if is_still else latents

    return network


def load_decoder(files: ModelFiles, kind: VaeKind, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    paths = {"encode path": kind.encode_weights, "decode path": kind.decode_weights}
    vae = read_whole_vae(files, paths)
    digest = encode_path_sha256(files, kind, vae.config, vae.state_dict())
    free_weights(vae, kind.encode_weights)
    return decoder_of(vae, kind.takes_frames, device), digest


def decoder_of(vae: Any, takes_frames: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Make a function from posterior means [N, C, H, W], or [N, C, T, H, W], not normalised, to RGB in [-1, 1].

    It works in float32, one image or clip at a time: a decoder's activations are large.
    """
    with silence_library(logging):
        vae = vae.to(device)

    @torch.inference_mode()
    def decode(latent_NCHW: Tensor) -> Tensor:
        latents = latent_NCHW.to(device, torch.float32)
        is_still = takes_frames and latents.dim() == 4
        ones = torch.split(latents.unsqueeze(2) if is_still else latents, 1)
        images = torch.cat([vae.decode(one, return_dict=False)[0] for one in ones])
        return images[:, :3].squeeze(2) if is_still else images[:, :3]

    return decode
