"""A frozen encoder as the build sees it (uint8 pixels in, float32 samples out), and a family of encoders.

Everything that changes a sample is in `identity`, or in the image recipe that named the pixel range. A family holds
what is known before torch is imported, and how its models are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, SampleLayout, TextRecipe
from precompute.encoders.config import EncoderConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from precompute.encoders.model_files import ModelFiles

    Decoder = tuple[Callable[[Tensor], Tensor], str]
    """From latents to RGB in [-1, 1], and the SHA-256 of the encode path that its weights came with."""

# Axes: N images, Y X pixels.


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
        """What it makes of one image of that size; ConfigError for a size that it would have to crop."""

    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, *shape], float32, on the encoder's device."""


NO_TOKEN = -1
"""In place of a token where a text is padded."""


class Tokens(NamedTuple):
    """A text as a text encoder reads it."""

    ids: list[int]
    """Cut to as many as it reads."""
    whole: int
    """How many there were before it was cut, without those that are dropped of its template."""


@runtime_checkable
class TextEncoder(Protocol):
    """Maps tokens of texts to samples, on one device; its `encode` takes int32 [N, T], padded with `NO_TOKEN`.

    Its layout is the same whatever the size of an image.
    """

    recipe: TextRecipe

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Put texts into the template and make tokens of them; from any thread."""


def to_signed(pixels: Tensor) -> Tensor:
    """Map [0, 255] to [-1, 1], in place: the range that encoders were trained on."""
    return pixels.div_(127.5).sub_(1)


def to_theworld(pixels: Tensor) -> Tensor:
    """Leave [0, 255] as it is, to reproduce what TheWorld feeds its VAE."""
    return pixels


def to_unit(pixels: Tensor) -> Tensor:
    """Map [0, 255] to [0, 1], in place."""
    return pixels.div_(255)


def standardised(mean: Channels, std: Channels) -> Callable[[Tensor], Tensor]:
    """Return a map, in place, from [0, 255] to [0, 1], then of each colour by its mean and deviation."""

    def to_range(pixels_N3YX: Tensor) -> Tensor:
        mean_3YX, std_3YX = (pixels_N3YX.new_tensor(each).view(3, 1, 1) for each in (mean, std))
        return to_unit(pixels_N3YX).sub_(mean_3YX).div_(std_3YX)

    return to_range


PIXEL_RANGES: dict[PixelRange, Callable[[Tensor], Tensor]] = {
    "signed": to_signed,
    "theworld": to_theworld,
    "unit": to_unit,
    **{name: standardised(mean, std) for name, (mean, std) in COLOUR_STATISTICS.items()},
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How models of some classes are checked and loaded."""

    load: Callable[[ModelFiles, EncoderConfig, PixelRange], Encoder]
    refuse_size: Callable[[Mapping[str, Any], int, int], None]
    """Raises ConfigError, by a model's config.json, for an image's height and width that it does not take."""
    takes: tuple[str, ...] = ()
    """Fields of `EncoderConfig` that are for some families alone, and for this one."""
    load_decoder: Callable[[ModelFiles, torch.device], Decoder] | None = None


def refuse_unfit(height: int, width: int, factor: int) -> None:
    """Raise ConfigError for a size that an encoder would have to crop."""
    if height < 1 or width < 1 or height % factor or width % factor:
        raise ConfigError(f"image.height and image.width must be multiples of {factor}, got {height}x{width}")


def refuse_other_side(height: int, width: int, side: int) -> None:
    """Raise ConfigError for a size that a tower has no positions for."""
    if (height, width) != (side, side):
        raise ConfigError(
            f"image.height and image.width must be {side}, as the tower was trained, got {height}x{width}"
        )
