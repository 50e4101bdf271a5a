"""The user's own encoder, by import path: `encoder.model: my_package.module:MyEncoder`.

The module must be installed, or be in a folder of PYTHONPATH. `OwnEncoder` says what a class needs.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import ImageRecipe, Normalization, SampleLayout, Size
from cache_store.format.normalization import UNSTATED
from cache_store.format.record import describe_mismatch
from precompute.encoders.encoder import (
    PIXEL_RANGES,
    Encoder,
    Family,
    PixelRange,
    accept_any_size,
    frames_in_range,
    range_of_images,
)
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, one_line
from precompute.encoders.weights import native_identity

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from precompute.encoders.encoder import Decoder

# Axes: N images or clips, T frames, Y X pixels.

NEEDED = ("identity", "layout", "encode")


class OwnEncoder(Protocol):
    """A user's class; each process makes one, as `MyEncoder(device, dtype)`.

    A `decode` is optional: for galleries, it maps samples to RGB in [-1, 1], [N, 3, T, Y, X]; T may be left out if it
    is 1. A `normalization`, optional too, says how its diffusion models take its samples: fields of `Normalization`.
    """

    identity: str
    """A text that changes with the samples: a version, or a digest of the weights."""

    def layout(self, size: Size) -> Mapping[str, int]:
        """Return names and lengths of a sample's one to four axes; raise ValueError for an unsuitable size.

        `size` has frames, height and width; an image is one frame. Three or four axes, the first named `channel`, are
        latents with a preview, the second of four being time; otherwise the last axis is the features.
        """

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        """Map RGB in `image.range` to samples; both in the class's dtype, on its device. Clips come one at a time."""


class OwnFamilyEncoder(Encoder):
    def __init__(self, own: OwnEncoder, path: str, config: EncoderConfig, pixel_range: PixelRange) -> None:
        self.device = config.torch_device
        identity = native_identity(config, class_name=path, weights_sha256=digest_of(own))
        self.identity = msgspec.structs.replace(identity, **normalization_of(own, path))
        self._own, self._path = own, path
        self._dtype, self._to_range = config.torch_dtype, PIXEL_RANGES[pixel_range]

    def array(self, size: Size) -> SampleLayout:
        """Raise ConfigError for an unsuitable size, or a layout that no cache can have."""
        try:
            sides = dict(self._own.layout(size))
            axes = tuple(sides)
            is_latent = len(axes) in (3, 4) and axes[0] == "channel"
            feature = axes[0 if is_latent else -1]
            if is_latent:
                refuse_other_channels(self.identity, sides["channel"])
            return SampleLayout(axes=axes, shape=tuple(sides.values()), feature_axis=feature, has_preview=is_latent)
        except (IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"encoder.model {self._path}: {one_line(error)}") from error

    def encode(self, pixels_NTYX3: Tensor) -> Tensor:
        import torch

        expected = (len(pixels_NTYX3), *self.array(Size(*pixels_NTYX3.shape[1:4])).shape)
        with torch.inference_mode():
            samples = self._own.encode(frames_in_range(pixels_NTYX3, self._to_range, self._dtype, self.device))
        if not isinstance(samples, torch.Tensor) or samples.shape != expected:
            found = tuple(samples.shape) if isinstance(samples, torch.Tensor) else type(samples).__name__
            raise ModelError(f"encoder.model {self._path}: encode gave {found}, and its layout says {expected}")
        return samples.float().contiguous()


def normalization_of(own: OwnEncoder, path: str) -> dict[str, Any]:
    stated = {**msgspec.structs.asdict(UNSTATED), **getattr(own, "normalization", {})}
    try:
        return msgspec.structs.asdict(msgspec.convert(stated, Normalization))
    except msgspec.ValidationError as error:
        raise ConfigError(f"encoder.model {path}: normalization: {describe_mismatch(error)}") from None


def refuse_other_channels(stated: Normalization, channels: int) -> None:
    stacked = channels * stated.latents_patch**2
    for name, values in (("latents_mean", stated.latents_mean), ("latents_std", stated.latents_std)):
        if len(values) not in (0, stacked):
            raise ValueError(f"normalization: {name} has {len(values)} values, expected {stacked}, one per channel")


def digest_of(own: OwnEncoder) -> str:
    return hashlib.sha256(str(own.identity).encode()).hexdigest()


def make_own(path: str, config: EncoderConfig) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        own_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"encoder.model {path} cannot be imported: {one_line(error)}; install its package, or name its folder in "
            "PYTHONPATH"
        ) from error
    if not isinstance(own_class, type):
        raise ModelError(f"encoder.model {path} is no class; expected one with {', '.join(NEEDED)}")
    try:
        own = own_class(config.torch_device, config.torch_dtype)
    except TypeError as error:
        raise ModelError(f"encoder.model {path} cannot be made as {class_name}(device, dtype): {error}") from error
    if missing := [name for name in NEEDED if not hasattr(own, name)]:
        raise ModelError(f"encoder.model {path} has no {missing[0]}; expected a class with {', '.join(NEEDED)}")
    return own


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> OwnFamilyEncoder:
    return OwnFamilyEncoder(make_own(files.model, config), files.model, config, range_of_images(image))


def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
    own = make_own(files.model, EncoderConfig(model=files.model, device=str(device), compute_dtype="float32"))
    if not hasattr(own, "decode"):
        raise ModelError(f"encoder.model {files.model} has no decoder: its class has no decode")
    return own.decode, digest_of(own)


FAMILY = Family(load=load, refuse_size=accept_any_size, load_decoder=load_decoder, takes_clips=True)
