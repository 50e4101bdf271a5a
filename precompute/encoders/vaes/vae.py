"""A frozen VAE as an encoder: the range its pixels enter in, and what of its posterior is kept.

`load_native` and `load_decoder` run it by diffusers, which only warns of weights that a checkpoint lacks and leaves
them unset; here a missing or unknown weight of a needed path is an error. Weights are read from safetensors alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import msgspec
import torch
import torch.nn.functional as F
from diffusers.utils import logging
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, Normalization, SampleLayout
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PIXEL_RANGES, PixelRange, refuse_unfit
from precompute.encoders.model_files import ModelFiles, quiet, refuse_partial
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.weights import loading, refuse_damaged, weights_sha256

# Axes: N images, Y X pixels, C latent channels, H W latent cells.


LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0
"""Bounds of a posterior's log-variance, as in diffusers' `DiagonalGaussianDistribution`."""


CPU_PIXELS = 2**15
"""Pixels that a CPU encodes at once: 8 images of 64x64, 2 of 128x128, 1 of 160x160 or more.

More work a call against activations that leave the cache. On two Zen 5 cores 8 images of 64x64 give 3.3 times the speed
of one at a time in float32 with a narrow Wan (1.4 with the full-size one) and 3.5 times (2.1) in bfloat16; 2 of
128x128 1.3 times (1.1). At 160x160 two give 1.35 times with the narrow model and nothing with the full-size one, and at
224x224 two are slower than one.
"""

Network = Callable[[Tensor], Tensor]
"""[N, 3, Y, X] to [N, 2C, H, W], posterior mean, then log-variance; or to [N, C, H, W] where there is no posterior."""


@dataclass(frozen=True, kw_only=True)
class FrozenVae:
    """The encode path of a VAE, on its device in its compute dtype, and what a cache must know of it."""

    network: Network
    class_name: str
    weights_sha256: str
    spatial_factor: int
    channels: int
    """Channels of a latent."""
    normalization: Normalization
    has_posterior: bool = True
    exact_pixels: bool = False
    """Whether the network takes pixels in float32, and rounds them itself."""
    is_folded: bool = False
    is_compilable: bool = False


class VaeEncoder:
    """Maps uint8 RGB to latents, on one device."""

    def __init__(self, vae: FrozenVae, config: EncoderConfig, pixel_range: PixelRange) -> None:
        if pixel_range not in ("signed", "theworld"):
            raise ConfigError(f"image.range: {pixel_range} is for vision towers; a {vae.class_name} needs signed")
        self.device = config.torch_device
        self.identity = EncoderIdentity(
            class_name=vae.class_name,
            weights_sha256=vae.weights_sha256,
            path="folded" if vae.is_folded else "native",
            compiled=config.compile if vae.is_compilable else False,
            posterior=config.posterior if vae.has_posterior else "none",
            compute_dtype=config.compute_dtype,
            batch_size=config.batch_size,
            **msgspec.structs.asdict(vae.normalization),
        )
        self._vae = vae
        self._dtype = config.torch_dtype
        self._to_range = PIXEL_RANGES[pixel_range]
        self._kept = KEPT[self.identity.posterior]

    def layout(self, height: int, width: int) -> SampleLayout:
        """[C, H, W], with statistics of each channel; ConfigError for a size that the encoder would have to crop."""
        factor = self._vae.spatial_factor
        refuse_unfit(height, width, factor * self.identity.latents_patch)
        channels = self._vae.channels * (2 if self.identity.posterior == "moments" else 1)
        return SampleLayout(
            axes=("channel", "latent_y", "latent_x"),
            shape=(channels, height // factor, width // factor),
            feature_axis="channel",
            has_preview=True,
        )

    @torch.inference_mode()
    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, C, H, W], float32, on the encoder's device."""
        pixels_N3YX = image_NYX3.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        pixels_N3YX = self._to_range(pixels_N3YX.float())
        latents_NCHW = self._vae.network(pixels_N3YX if self._vae.exact_pixels else pixels_N3YX.to(self._dtype))
        return self._kept(latents_NCHW).float().contiguous()


def few_at_once(network: Network) -> Network:
    """A network that gets a batch in parts, for a CPU.

    It is cut by the images' size alone, so that the bits do not depend on what else the machine does.
    """

    def in_parts(image_N3YX: Tensor) -> Tensor:
        height, width = image_N3YX.shape[2:]
        parts: Sequence[Tensor] = torch.split(image_N3YX, max(1, CPU_PIXELS // (height * width)))
        return torch.cat([network(part_N3YX) for part_N3YX in parts])

    return in_parts


def opaque(image_N3YX: Tensor) -> Tensor:
    """Append an alpha channel that hides nothing, in [-1, 1] as the colours."""
    return F.pad(image_N3YX, (0, 0, 0, 0, 0, 1), value=1.0)


def posterior_mean(moments_NCHW: Tensor) -> Tensor:
    return moments_NCHW.chunk(2, dim=1)[0]


def posterior_moments(moments_NCHW: Tensor) -> Tensor:
    mean_NCHW, logvar_NCHW = moments_NCHW.chunk(2, dim=1)
    return torch.cat([mean_NCHW, logvar_NCHW.clamp(LOGVAR_MIN, LOGVAR_MAX)], dim=1)


def whole_latent(latent_NCHW: Tensor) -> Tensor:
    return latent_NCHW


KEPT = {"mean": posterior_mean, "moments": posterior_moments, "none": whole_latent}
"""The part of a network's output that a cache holds, by the identity's `posterior`."""


# Axes: N images, C latent channels, H W latent cells, T frames, Y X pixels, 3 RGB.


Fold = Callable[[torch.nn.Module, torch.dtype], None]
"""Puts layers for still images, in a dtype, into the place of those of an encoder."""

WEIGHTS = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
"""As diffusers looks for them."""


def read_whole_vae(files: ModelFiles, needed: Mapping[str, tuple[str, ...]]) -> Any:
    """The model in float32, frozen; ModelError when anything of the paths needed is wrong."""
    with quiet(logging), loading(files):
        refuse_damaged(files, WEIGHTS)
        vae, report = getattr(diffusers, files.class_name).from_pretrained(
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


def load_native(files: ModelFiles, kind: VaeKind, config: EncoderConfig, fold: Fold | None = None) -> FrozenVae:
    """The frozen encode path of the model in `files`, as diffusers runs it, or with layers that `fold` puts into it."""
    vae = read_whole_vae(files, {"encode path": kind.encode_weights + kind.further_weights})
    drop(vae, kind.decode_weights)
    with loading(files):
        weights = vae.state_dict()
        digest = encode_path_sha256(files, kind, vae.config, weights)  # before these are rounded in place
        normalization = kind.normalization(vae.config, weights)
        refuse_other_lengths(files, kind, normalization, vae.config[kind.channels])
    if fold is not None:
        fold(vae.encoder, config.torch_dtype)
    on_cpu = config.torch_device.type == "cpu"
    network = native_network(vae, kind, config)
    return FrozenVae(
        network=few_at_once(network) if on_cpu else network,
        class_name=files.class_name,
        weights_sha256=digest,
        spatial_factor=kind.spatial_factor(vae.config),
        channels=vae.config[kind.channels],
        normalization=normalization,
        has_posterior=kind.has_posterior,
        exact_pixels=bool(kind.float32_until),
        is_folded=fold is not None,
    )


def drop(vae: Any, weights: tuple[str, ...]) -> None:
    """Free a path's weights; its modules stay, empty, as some classes count what is in them."""
    for name in weights:
        setattr(vae, name.removesuffix("."), torch.nn.Module())


def encode_path_sha256(
    files: ModelFiles, kind: VaeKind, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> str:
    """The hash of the encode path; `weights` may have others beside it."""
    chosen = ((name, weight) for name, weight in weights.items() if name.startswith(kind.encode_weights))
    return weights_sha256(files.class_name, config, kind.encode_config, chosen)


def native_network(vae: Any, kind: VaeKind, config: EncoderConfig) -> Network:
    """The path of diffusers itself, each image perhaps a video of one frame."""
    has_alpha = kind.pixel_channels(vae.config) == 4
    with quiet(logging):
        vae = vae.to(config.torch_device, config.torch_dtype)
    if kind.float32_until:
        first = vae.encoder.get_submodule(kind.float32_until)
        first.register_forward_hook(lambda _, __, made: made.to(config.torch_dtype))

    def network(image_N3YX: Tensor) -> Tensor:
        entering = (opaque(image_N3YX) if has_alpha else image_N3YX).contiguous()
        (encoded,) = vae.encode(entering.unsqueeze(2) if kind.takes_frames else entering, return_dict=False)
        latents: Tensor = encoded if isinstance(encoded, Tensor) else encoded.parameters
        return latents.squeeze(2) if kind.takes_frames else latents

    return network


def load_decoder(files: ModelFiles, kind: VaeKind, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    """The decoder, and the SHA-256 of the encode path that its weights came with."""
    paths = {"encode path": kind.encode_weights, "decode path": kind.decode_weights}
    vae = read_whole_vae(files, paths)
    digest = encode_path_sha256(files, kind, vae.config, vae.state_dict())
    drop(vae, kind.encode_weights)
    return decoder_of(vae, kind.takes_frames, device), digest


def decoder_of(vae: Any, takes_frames: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Map posterior means as the encoder gives them, not normalised, [N, C, H, W], to RGB in [-1, 1], [N, 3, Y, X].

    In float32, one image at a time, since on a CPU a decoder's activations are large.
    """
    with quiet(logging):
        vae = vae.to(device)

    @torch.inference_mode()
    def decode(latent_NCHW: Tensor) -> Tensor:
        latents = latent_NCHW.to(device, torch.float32)
        ones = torch.split(latents.unsqueeze(2) if takes_frames else latents, 1)
        images = torch.cat([vae.decode(one, return_dict=False)[0] for one in ones])
        return images[:, :3].squeeze(2) if takes_frames else images[:, :3]

    return decode
