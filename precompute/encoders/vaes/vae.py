"""An encoder made from a frozen VAE: it scales the pixels, and keeps the posterior's mean or both moments."""

# Axes: N images or clips, T frames, Y X pixels, C latent channels, H W latent cells.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, ImageRecipe, Normalization, SampleLayout, Size
from precompute.encoders.encoder import (
    PIXEL_RANGES,
    Encoder,
    frames_in_range,
    range_of_images,
    refuse_cropping,
    still_in_range,
)
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.vaes.kind import ClipRule, Config, VaeKind

LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0
"""Bounds of a posterior's log-variance, as in diffusers' `DiagonalGaussianDistribution`."""


VAE_CPU_PIXELS = 2**15
"""Pixels that a CPU encodes at once: 8 images of 64x64, 2 of 128x128, 1 of 160x160 or more.

More at once no longer fit the CPU's cache. On two Zen 5 cores 8 of 64x64 are 1.4 times as fast as one by one with the
full-size Wan in float32, 2.1 times in bfloat16; 2 of 128x128 1.1 times; at 224x224 two are slower than one.
"""

Network = Callable[[Tensor], Tensor]
"""Maps [N, 3, Y, X] to [N, 2C, H, W], the posterior's mean and log-variance; without a posterior, to [N, C, H, W].
Maps clips likewise, with an axis of frames after the channels."""


@dataclass(frozen=True, kw_only=True)
class FrozenVae:
    """The encode path of a VAE, on its device, and the facts that a cache records."""

    network: Network
    class_name: str
    weights_sha256: str
    kind: VaeKind
    config: Config
    """The values of its config.json, with all defaults."""
    normalization: Normalization
    is_folded: bool
    clips: ClipRule | None = None
    """How clips are encoded; None for a network of images."""


class VaeEncoder(Encoder):
    def __init__(self, vae: FrozenVae, config: EncoderConfig, image: ImageRecipe | None) -> None:
        pixel_range = range_of_images(image)
        if pixel_range not in ("signed", "theworld"):
            raise ConfigError(f"image.range: {pixel_range} is for vision towers; a {vae.class_name} needs signed")
        self.device = config.torch_device
        self.identity = EncoderIdentity(
            class_name=vae.class_name,
            weights_sha256=vae.weights_sha256,
            path="folded" if vae.is_folded else "native",
            compiled=config.compile if vae.is_folded and vae.kind.folds == "wan" else False,
            posterior=config.posterior if vae.kind.has_posterior else "none",
            compute_dtype=config.compute_dtype,
            batch_size=config.batch_size,
            **msgspec.structs.asdict(vae.normalization),
        )
        self._vae, self._clips = vae, vae.clips
        self.is_captured = vae.clips is None  # a clip takes seconds, so that launches cost nothing
        self._dtype = config.torch_dtype
        self._to_range = PIXEL_RANGES[pixel_range]
        self._kept = KEPT[self.identity.posterior]

    def array(self, size: Size) -> SampleLayout:
        """Describe a sample: [C, H, W], or for clips [C, T, H, W]."""
        kind, config = self._vae.kind, self._vae.config
        factor = kind.spatial_factor(config)
        refuse_cropping(size.height, size.width, kind.multiple(config))
        channels = config[kind.channels] * (2 if self.identity.posterior == "moments" else 1)
        frames = () if self._clips is None else (self._clips.latent_frames(size.frames, self._vae.class_name),)
        return SampleLayout(
            axes=("channel", *(["latent_t"] if frames else []), "latent_y", "latent_x"),
            shape=(channels, *frames, size.height // factor, size.width // factor),
            feature_axis="channel",
            has_preview=True,
        )

    @torch.inference_mode()
    def encode(self, pixels_NTYX3: Tensor) -> Tensor:
        """Map uint8 RGB to [N, C, H, W]; or clips, one at a time on a GPU too, which it fills, to [N, C, T, H, W]."""
        dtype = torch.float32 if self._vae.kind.float32_until else self._dtype
        if self._clips is None:
            image_N3YX = still_in_range(pixels_NTYX3, self._to_range, self.device)
            return self._kept(self._vae.network(image_N3YX.to(dtype))).float().contiguous()
        latents = []
        for clip_1TYX3 in torch.split(pixels_NTYX3, 1):
            pixels_13TYX = frames_in_range(clip_1TYX3, self._to_range, dtype, self.device)
            latents.append(self._kept(self._vae.network(pixels_13TYX)).float().contiguous())
        return torch.cat(latents)

    def prefix(self, inputs: Tensor) -> tuple[Tensor, int | None]:
        # equal but for rounding: a convolution over another length may add in another order
        if self._clips is None:
            return inputs, None
        frames, latent_frames = self._clips.prefix(inputs.shape[1])
        return inputs[:, :frames], latent_frames


def split_batches(network: Network) -> Network:
    """Make a network that takes a batch in parts, for a CPU; parts and bits depend only on the images' size."""

    def in_parts(image_N3YX: Tensor) -> Tensor:
        height, width = image_N3YX.shape[-2:]
        parts: Sequence[Tensor] = torch.split(image_N3YX, max(1, VAE_CPU_PIXELS // (height * width)))
        return torch.cat([network(part_N3YX) for part_N3YX in parts])

    return in_parts


def add_alpha(image_N3YX: Tensor) -> Tensor:
    return F.pad(image_N3YX, (0, 0, 0, 0, 0, 1), value=1.0)


def posterior_moments(moments_NCHW: Tensor) -> Tensor:
    mean_NCHW, logvar_NCHW = moments_NCHW.chunk(2, dim=1)
    return torch.cat([mean_NCHW, logvar_NCHW.clamp(LOGVAR_MIN, LOGVAR_MAX)], dim=1)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda moments_NCHW: moments_NCHW.chunk(2, dim=1)[0],
    "moments": posterior_moments,
    "none": lambda latent_NCHW: latent_NCHW,
}
"""Selects the part of a network's output that a cache holds, by the identity's `posterior`."""
