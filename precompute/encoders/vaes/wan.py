"""The encoder of Wan 2.1 and Cosmos-Predict2, an `AutoencoderKLWan`: folded, or as diffusers runs it."""

# Axes: N images, Y X pixels.

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.image_size import wan_spatial_factor
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.folded_wan import FoldedWanEncoder
from precompute.encoders.vaes.vae import FrozenVae
from precompute.encoders.vaes.wan_files import ENCODE_PATH, WanConfig, encode_path_sha256, read_encode_path, wan_config
from precompute.encoders.weight_files import loading

CPU_PIXELS = 2**15
"""Of the images that a CPU encodes at once: 8 of 64x64, 2 of 128x128, 1 of 160x160 or more.

More work a call against activations that leave the cache. On two Zen 5 cores 8 images of 64x64 give 3.3 times the speed
of one at a time in float32 with a narrow model (1.4 with the full-size one) and 3.5 times (2.1) in bfloat16; 2 of
128x128 1.3 times (1.1). At 160x160 two give 1.35 times with the narrow model and nothing with the full-size one, and at
224x224 two are slower than one.
"""

Moments = Callable[[Tensor], Tensor]


def load_wan(files: ModelFiles, config: EncoderConfig) -> FrozenVae:
    """The frozen encode path of the `AutoencoderKLWan` in `files`."""
    with loading(files):
        held = wan_config(files)
        moments, digest = (load_folded if config.fold else load_native)(files, held, config)
    return FrozenVae(
        moments=moments,
        class_name=files.class_name,
        weights_sha256=digest,
        spatial_factor=wan_spatial_factor(files.config),
        latents_mean=held.latents_mean,
        latents_std=held.latents_std,
    )


def load_folded(files: ModelFiles, held: WanConfig, config: EncoderConfig) -> tuple[Moments, str]:
    """The folded path, and the hash of the weights that it was made of."""
    refuse_unfoldable(held)
    weights = read_encode_path(files, held)
    return folded_moments(weights, config), encode_path_sha256(files, held, weights)


def load_native(files: ModelFiles, held: WanConfig, config: EncoderConfig) -> tuple[Moments, str]:
    """The path of diffusers, which is imported here alone: it takes seconds, of each worker's start too."""
    from precompute.encoders.vaes.wan_diffusers import native_moments, read_whole_vae

    vae = read_whole_vae(files, ENCODE_PATH)
    vae.decoder = vae.post_quant_conv = None
    digest = encode_path_sha256(files, held, vae.state_dict())  # before these weights are rounded in place
    return native_moments(vae, config), digest


def refuse_unfoldable(held: WanConfig) -> None:
    """Raise ConfigError for Wan 2.2, whose residual down blocks and patches are not folded here."""
    if held.is_residual or held.patch_size is not None:
        found = f"is_residual {held.is_residual}, patch_size {held.patch_size}"
        raise ConfigError(f"encoder.fold covers Wan 2.1 only, and this model has {found}; set encoder.fold: false")


def folded_moments(weights: Mapping[str, Tensor], config: EncoderConfig) -> Moments:
    """The folded path; on a CPU a few images of a batch at a time."""
    if config.compile:
        refuse_without_compiler(config.torch_device)
    folded = FoldedWanEncoder(weights, config.torch_dtype).to(config.torch_device).eval()
    network: Moments = torch.compile(folded, dynamic=False) if config.compile else folded
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
