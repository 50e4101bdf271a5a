"""The VAE of Wan 2.1 and Cosmos-Predict2: load diffusers' `AutoencoderKLWan` and keep its encode path, whole.

diffusers only warns of weights that a checkpoint lacks and leaves them unset; here a missing or unknown encode-path
weight is an error. Weights are read from safetensors alone, never from pickles.
"""

# Axes: N images, Y X pixels.

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.utils import logging
from safetensors import SafetensorError
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.folded_wan import FoldedWanEncoder
from precompute.encoders.identity import weights_sha256
from precompute.encoders.image_size import wan_spatial_factor
from precompute.encoders.model_files import ModelFiles, one_line, quiet, refuse_partial
from precompute.encoders.vae import FrozenVae

ENCODE_CONFIG = (
    "base_dim",
    "z_dim",
    "dim_mult",
    "num_res_blocks",
    "attn_scales",
    "temperal_downsample",
    "is_residual",
    "in_channels",
    "patch_size",
)
ENCODE_WEIGHTS = ("encoder.", "quant_conv.")
ENCODE_PATH = {"encode path": ENCODE_WEIGHTS}

CPU_PIXELS = 2**15
"""Of the images that a CPU encodes at once: 8 of 64x64, 2 of 128x128, 1 of 160x160 or more.

More work a call against activations that leave the cache. On two Zen 5 cores 8 images of 64x64 give 3.3 times the speed
of one at a time in float32 with a narrow model (1.4 with the full-size one) and 3.5 times (2.1) in bfloat16; 2 of
128x128 1.3 times (1.1). At 160x160 two give 1.35 times with the narrow model and nothing with the full-size one, and at
224x224 two are slower than one.
"""


def load_wan(files: ModelFiles, config: EncoderConfig) -> FrozenVae:
    """The frozen encode path of the `AutoencoderKLWan` in `files`."""
    vae = read_whole_vae(files, ENCODE_PATH)
    vae.decoder = vae.post_quant_conv = None
    digest = encode_path_sha256(files, vae)  # of the float32 weights: the native path rounds them in place
    return FrozenVae(
        moments=folded_moments(vae, config) if config.fold else native_moments(vae, config),
        class_name=files.class_name,
        weights_sha256=digest,
        spatial_factor=wan_spatial_factor(vae.config),
        latents_mean=tuple(map(float, vae.config.latents_mean)),
        latents_std=tuple(map(float, vae.config.latents_std)),
    )


def encode_path_sha256(files: ModelFiles, vae: Any) -> str:
    weights = ((name, weight) for name, weight in vae.state_dict().items() if name.startswith(ENCODE_WEIGHTS))
    return weights_sha256(files.class_name, vae.config, ENCODE_CONFIG, weights)


def read_whole_vae(files: ModelFiles, needed: Mapping[str, tuple[str, ...]]) -> Any:
    """The model in float32, frozen; ModelError when anything of the paths needed is wrong."""
    try:
        with quiet(logging):
            vae, report = AutoencoderKLWan.from_pretrained(
                files.model,
                subfolder=files.subfolder or None,
                torch_dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        # What diffusers raises for absent, cut or pickled weights, for wrong shapes and for configs it cannot build.
        raise ModelError(f"encoder.model {files.model} cannot be loaded: {one_line(error)}") from error
    for path, prefixes in needed.items():
        refuse_partial(files, report, path, prefixes)
    refuse_unscaled(files, vae.config)
    return vae.requires_grad_(False).eval()


def refuse_unscaled(files: ModelFiles, config: Any) -> None:
    """Raise ModelError unless there is a mean and a deviation for every latent channel."""
    for key in ("latents_mean", "latents_std"):
        if len(config[key]) != config.z_dim:
            raise ModelError(
                f"encoder.model {files.model} has {len(config[key])} values of {key} for {config.z_dim} latent"
                f" channels; write {config.z_dim} into its config.json"
            )


def folded_moments(vae: Any, config: EncoderConfig) -> Callable[[Tensor], Tensor]:
    """The folded path; on a CPU a few images of a batch at a time."""
    if config.compile:
        refuse_without_compiler(config.torch_device)
    folded = FoldedWanEncoder(vae, config.torch_dtype).to(config.torch_device).eval()
    network: Callable[[Tensor], Tensor] = torch.compile(folded, dynamic=False) if config.compile else folded
    if config.torch_device.type != "cpu":
        return network
    return lambda image_N3YX: torch.cat([network(some_N3YX) for some_N3YX in cpu_chunks(image_N3YX)])


def cpu_chunks(image_N3YX: Tensor) -> Sequence[Tensor]:
    """A batch cut by the images' size alone, so that the bits do not depend on what else the machine does."""
    height, width = image_N3YX.shape[2:]
    return torch.split(image_N3YX, max(1, CPU_PIXELS // (height * width)))


def refuse_without_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile finds no compiler: known before a cache is begun, not at its first image."""
    from torch._dynamo.exc import TorchDynamoException  # what torch.compile raises, whichever part of it fails

    try:
        torch.compile(torch.square)(torch.ones(1, device=device))
    except TorchDynamoException as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton"
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"encoder.compile: torch.compile does not work here ({problem}); "
            f"install {needed}, or set encoder.compile: false"
        ) from error


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
