"""An encoder made from a frozen VAE: it scales the pixels, and keeps the posterior's mean or both moments."""

# Axes: N images, Y X pixels, C latent channels, H W latent cells.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, Normalization, SampleLayout
from precompute.encoders.encoder import PIXEL_RANGES, PixelRange, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.vaes.kind import ClipRule

LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0
"""Bounds of a posterior's log-variance, as in diffusers' `DiagonalGaussianDistribution`."""


VAE_CPU_PIXELS = 2**15
"""Pixels that a CPU encodes at once: 8 images of 64x64, 2 of 128x128, 1 of 160x160 or more.

This balances more work per call against activations that no longer fit the CPU's cache. On two Zen 5 cores 8 images of
64x64 give 3.3 times the speed of one at a time in float32 with a narrow Wan (1.4 with the full-size one) and 3.5 times
(2.1) in bfloat16; 2 of 128x128 1.3 times (1.1). At 160x160 two give 1.35 times with the narrow model and nothing with
the full-size one, and at 224x224 two are slower than one.
"""

Network = Callable[[Tensor], Tensor]
"""Maps [N, 3, Y, X] to [N, 2C, H, W], the posterior's mean and log-variance; without a posterior, to [N, C, H, W].
Maps clips likewise, with an axis of frames after the channels."""


@dataclass(frozen=True, kw_only=True)
class FrozenVae:
    """The encode path of a VAE, on its device in its compute dtype, and the facts that a cache records."""

    network: Network
    class_name: str
    weights_sha256: str
    spatial_factor: int
    multiple: int
    """Pixels whose multiples an image's height and width must be."""
    channels: int
    """Channels of a latent."""
    normalization: Normalization
    has_posterior: bool = True
    exact_pixels: bool = False
    """Whether the network takes pixels in float32 and rounds later."""
    is_folded: bool = False
    is_compilable: bool = False
    clips: ClipRule | None = None
    """How clips are encoded; None if the network takes images alone."""


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
        """Describe a sample [C, H, W] with statistics per channel; raise ConfigError for a size that needs cropping."""
        factor = self._vae.spatial_factor
        refuse_cropping(height, width, self._vae.multiple)
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


def split_batches(network: Network) -> Network:
    """Make a network that takes a batch of images in parts, for a CPU.

    The parts depend only on the images' size, so that the bits do not depend on the machine's load.
    """

    def in_parts(image_N3YX: Tensor) -> Tensor:
        height, width = image_N3YX.shape[-2:]
        parts: Sequence[Tensor] = torch.split(image_N3YX, max(1, VAE_CPU_PIXELS // (height * width)))
        return torch.cat([network(part_N3YX) for part_N3YX in parts])

    return in_parts


def add_alpha(image_N3YX: Tensor) -> Tensor:
    """Append an opaque alpha channel to RGB in [-1, 1]."""
    return F.pad(image_N3YX, (0, 0, 0, 0, 0, 1), value=1.0)


def posterior_mean(moments_NCHW: Tensor) -> Tensor:
    return moments_NCHW.chunk(2, dim=1)[0]


def posterior_moments(moments_NCHW: Tensor) -> Tensor:
    mean_NCHW, logvar_NCHW = moments_NCHW.chunk(2, dim=1)
    return torch.cat([mean_NCHW, logvar_NCHW.clamp(LOGVAR_MIN, LOGVAR_MAX)], dim=1)


def whole_latent(latent_NCHW: Tensor) -> Tensor:
    return latent_NCHW


KEPT = {"mean": posterior_mean, "moments": posterior_moments, "none": whole_latent}
"""Selects the part of a network's output that a cache holds, by the identity's `posterior`."""
