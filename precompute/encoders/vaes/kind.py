"""The facts about a class of diffusers' VAEs, and how it encodes clips. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import Normalization

if TYPE_CHECKING:
    from precompute.encoders.model_files import ModelFiles

Config = Mapping[str, Any]
"""The values of a model's config.json, perhaps with diffusers' defaults for missing ones."""

MEANS = ("latents_mean", "latents_std")
"""Names of the statistics of latents, in configs and weights."""


def config_normalization(config: Config, weights: Config, is_clip: bool = False) -> Normalization:
    """Normalise as most pipelines: by the config's mean, deviation, shift and scale, if it has them."""
    scale = config.get("scaling_factor")
    return Normalization(
        latents_mean=tuple(config.get("latents_mean") or ()),
        latents_std=tuple(config.get("latents_std") or ()),
        latents_shift=config.get("shift_factor") or None,
        latents_scale=None if scale == 1 else scale,
    )


Prefix = tuple[int, int]
"""Frames of a clip's beginning, and how many latent frames they have in common with the whole clip."""


@dataclass(frozen=True, kw_only=True)
class ClipRule:
    """How a VAE encodes clips."""

    factor: int
    """Frames of a latent frame, but for the first latent frame, which has one."""
    step: int
    """A clip has one frame more than a multiple of this."""
    prefix_of: Callable[[int], Prefix] | None = None
    """Returns the prefix of a clip with so many frames; by default the shortest clip of several frames."""

    def latent_frames(self, frames: int, class_name: str) -> int:
        """Return how many latent frames a clip has; ConfigError for a number of frames that would be cut."""
        if frames % self.step != 1 % self.step:
            below = (frames - 1) // self.step * self.step + 1
            raise ConfigError(
                f"clip.frames must be {self.step}k + 1 for {class_name}, got {frames}; the nearest are {below} and "
                f"{below + self.step}"
            )
        return 1 + (frames - 1) // self.factor

    def prefix(self, frames: int) -> Prefix:
        """Return the shortest beginning that has at least two latent frames, if the clip has, and equals the clip's."""
        if frames == 1:
            return 1, 1
        return self.prefix_of(frames) if self.prefix_of else (1 + self.step, 1 + self.step // self.factor)


@dataclass(frozen=True, kw_only=True)
class VaeKind:
    spatial_factor: Callable[[Config], int]
    """Reads the pixels of a latent cell's side from config.json."""
    cells: Callable[[Config], int] = lambda config: 1
    """Reads the side, in cells, of the square that diffusion models take as one, where the VAE tells it."""
    encode_config: tuple[str, ...]
    channels: str = "latent_channels"
    has_quant_conv: bool = True
    """Whether there may be a convolution after the encoder and before the decoder."""
    further_weights: tuple[str, ...] = ()
    """Prefixes of the weights that the normalisation depends on."""
    normalization: Callable[[Config, Config, bool], Normalization] = config_normalization
    """Reads the normalisation, of images or of clips, from the config, with all defaults, and the weights by name."""
    needs_means: bool = False
    has_posterior: bool = True
    takes_frames: bool = False
    """Whether an image enters as a video of one frame."""
    folds: Literal["", "still", "wan"] = ""
    """How the encoder is folded for still images: by `fold_still`, or as `FoldedWanEncoder`."""
    clips: Callable[[Config], ClipRule] | None = None
    """Reads how clips are encoded, from the config with all defaults; None for a class that encodes images alone."""
    float32_until: str = ""
    """The part of the encoder that takes pixels in float32, whatever the dtype, because it amplifies rounding."""

    @property
    def encode_weights(self) -> tuple[str, ...]:
        return ("encoder.", "quant_conv.") if self.has_quant_conv else ("encoder.",)

    @property
    def decode_weights(self) -> tuple[str, ...]:
        return ("decoder.", "post_quant_conv.") if self.has_quant_conv else ("decoder.",)

    def multiple(self, config: Config) -> int:
        """Return the pixels whose multiples an image's height and width must be."""
        return self.spatial_factor(config) * self.cells(config)


def stated_factor(config: Config) -> int:
    factor: int = config.get("spatial_compression_ratio", 8)
    return factor


def factor_of_levels(key: str, default: tuple[Any, ...]) -> Callable[[Config], int]:
    """Make the spatial factor of a VAE that halves its sides between the levels of the config's `key`."""

    def spatial_factor(config: Config) -> int:
        factor: int = 2 ** (len(config.get(key, default)) - 1)
        return factor

    return spatial_factor


def refuse_other_lengths(files: ModelFiles, kind: VaeKind, normalization: Normalization, channels: int) -> None:
    """Raise ModelError unless there are as many means and deviations as latent channels, or none."""
    wanted = channels * normalization.latents_patch**2
    lengths = {name: len(getattr(normalization, name)) for name in MEANS}
    for name, length in lengths.items():
        if length != wanted and (kind.needs_means or any(lengths.values())):
            raise ModelError(
                f"encoder.model {files.model} has {length} values of {name} for {wanted} latent"
                f" channels; write {wanted} into its config.json"
            )
