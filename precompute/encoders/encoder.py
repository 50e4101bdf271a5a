"""A frozen encoder as the build sees it (uint8 pixels in, float32 samples out), and a family of encoders.

Everything that changes a sample is in `identity`, or in the image recipe with its pixel range. A family has the checks
that need no torch, and loads its models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, SampleLayout, TextRecipe
from precompute.encoders.encoder_config import EncoderConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from precompute.encoders.model_files import ModelFiles

    Decoder = tuple[Callable[[Tensor], Tensor], str]
    """Maps latents to RGB in [-1, 1]; with the SHA-256 of the encode path in the same checkpoint."""

# Axes: N images or clips, T frames, Y X pixels.


PixelRange = Literal["signed", "theworld", "clip", "imagenet", "unit"]

Channels = tuple[float, float, float]

COLOUR_STATISTICS: dict[PixelRange, tuple[Channels, Channels]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and deviation of red, green and blue in [0, 1]: transformers' `OPENAI_CLIP_MEAN` and `IMAGENET_DEFAULT_MEAN`."""


class Encoder(Protocol):
    """Maps uint8 RGB to samples, on one device."""

    device: torch.device
    identity: EncoderIdentity

    def layout(self, height: int, width: int) -> SampleLayout:
        """Describe the sample made from an image of this size; raise ConfigError for a size that needs cropping."""

    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, *shape], float32, on the encoder's device."""


@runtime_checkable
class ClipEncoder(Encoder, Protocol):
    """An encoder that also maps clips to samples; its `encode` then takes uint8 RGB [N, T, Y, X, 3]."""

    def clip_layout(self, frames: int, height: int, width: int) -> SampleLayout:
        """Describe the sample made from a clip; raise ConfigError for a number of frames, or a size, to be cut."""

    def clip_prefix(self, frames: int) -> tuple[int, int]:
        """Return how many frames of a clip to encode alone, and how many latent frames are then those of the clip."""


NO_TOKEN = -1
"""Pads a text's tokens."""


class Tokens(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    """Tokens for the encoder, cut to its maximum."""
    whole: int
    """Number of tokens before the cut, without the dropped ones of the template."""


@runtime_checkable
class TextEncoder(Protocol):
    """Maps tokens of texts to samples, on one device; its `encode` takes int32 [N, T], padded with `NO_TOKEN`.

    Its layout does not depend on the size of an image.
    """

    recipe: TextRecipe
    null_ids: Sequence[int]
    """Tokens of the null prompt, cut as those of a text."""

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Put each text into the template and tokenize it; called from several threads."""


def to_signed(pixels: Tensor) -> Tensor:
    """Map [0, 255] to [-1, 1], the range that encoders were trained on, in place."""
    return pixels.div_(127.5).sub_(1)


def to_theworld(pixels: Tensor) -> Tensor:
    """Leave [0, 255] unchanged, as TheWorld feeds its VAE."""
    return pixels


def to_unit(pixels: Tensor) -> Tensor:
    """Map [0, 255] to [0, 1], in place."""
    return pixels.div_(255)


def make_standardiser(mean: Channels, std: Channels) -> Callable[[Tensor], Tensor]:
    """Return a map, in place, from [0, 255] to [0, 1], then to each colour's mean 0 and deviation 1."""

    def to_range(pixels_N3YX: Tensor) -> Tensor:
        mean_3YX, std_3YX = (pixels_N3YX.new_tensor(each).view(3, 1, 1) for each in (mean, std))
        return to_unit(pixels_N3YX).sub_(mean_3YX).div_(std_3YX)

    return to_range


PIXEL_RANGES: dict[PixelRange, Callable[[Tensor], Tensor]] = {
    "signed": to_signed,
    "theworld": to_theworld,
    "unit": to_unit,
    **{name: make_standardiser(mean, std) for name, (mean, std) in COLOUR_STATISTICS.items()},
}


def clip_pixels(
    clip_TYX3: Tensor, to_range: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Convert uint8 RGB to a model's range: [1, 3, T, Y, X] in `dtype`, on `device`.

    One frame at a time is float32: a whole clip of 81 x 480 x 832 would take 388 MB.
    """
    shape = (1, 3, *clip_TYX3.shape[:3])
    pixels_13TYX = clip_TYX3.new_empty(shape, dtype=dtype, device=device)
    for number, frame_YX3 in enumerate(clip_TYX3.to(device, non_blocking=True)):
        pixels_13TYX[0, :, number] = to_range(frame_YX3.permute(2, 0, 1).float())
    return pixels_13TYX


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checks and loads models of some classes."""

    load: Callable[[ModelFiles, EncoderConfig, PixelRange], Encoder]
    refuse_size: Callable[[Mapping[str, Any], int, int], None]
    """Raises ConfigError if the model, by its config.json, cannot take images of this height and width."""
    takes: tuple[str, ...] = ()
    """Fields in `FAMILY_FIELDS` that this family uses."""
    load_decoder: Callable[[ModelFiles, torch.device], Decoder] | None = None
    load_clips: Callable[[ModelFiles, EncoderConfig, PixelRange], ClipEncoder] | None = None
    """Loads a model to encode clips; raises ConfigError for a class that encodes images alone."""


def accept_any_size(config: Mapping[str, Any], height: int, width: int) -> None:
    """Refuse no size: the family reads no images, or its `layout` refuses sizes."""


def refuse_cropping(height: int, width: int, factor: int) -> None:
    """Raise ConfigError for a size that an encoder would have to crop."""
    if height < 1 or width < 1 or height % factor or width % factor:
        nearest = "x".join(str(max(1, round(side / factor)) * factor) for side in (height, width))
        got = f"got {height}x{width}; the nearest is {nearest}"
        raise ConfigError(f"image.height and image.width must be multiples of {factor}, {got}")


NO_CLIPS = {"AutoencoderKLCosmos": " here, because the normalisation of its latents differs by frame"}
"""Classes that could encode clips, and the reason why they do not."""


def images_alone(class_name: str) -> ConfigError:
    """Make the error for a model that cannot encode clips."""
    reason = NO_CLIPS.get(class_name, "")
    return ConfigError(
        f"encoder.model: {class_name} encodes images alone{reason}; leave clip out, or take a video model's VAE"
    )


def refuse_other_size(height: int, width: int, side: int) -> None:
    """Raise ConfigError for a size that a tower has no positions for."""
    if (height, width) != (side, side):
        raise ConfigError(
            f"image.height and image.width must be {side}, as the tower was trained, got {height}x{width}"
        )
