"""A frozen encoder as the build sees it (pixels or tokens in, float32 samples out), and a family of encoders.

Everything that changes a sample is in `identity`, or in the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from cache_store.errors import ConfigError
from cache_store.format.array import EncoderIdentity, ImageRecipe, SampleLayout, Size, TextRecipe
from precompute.encoders.encoder_config import VISION_CONFIG, Clean, EncoderConfig, Padding

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


NO_TOKEN = -1
"""Pads a text's tokens."""


class Tokens(NamedTuple):
    ids: list[int]
    """A text's tokens, cut to the encoder's maximum."""
    whole: int
    """Number of tokens before the cut, without the dropped ones of the template."""


class TextInputs(Protocol):
    """Turns texts into tokens."""

    recipe: TextRecipe
    null_ids: Sequence[int]
    """Tokens of the null prompt, cut as those of a text."""

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Put each text into the template and tokenize it; called from several threads."""


class Encoder(Protocol):
    """Maps frames, or tokens of texts, to samples, on one device; it was loaded for one recipe."""

    device: torch.device
    identity: EncoderIdentity
    texts: TextInputs | None = None
    """None if the encoder reads frames."""
    is_captured: bool = True
    """Whether its work on a GPU is captured as a graph: one launch for a batch in place of hundreds."""

    def array(self, size: Size) -> SampleLayout:
        """Describe the sample of an input of this size; raise ConfigError for one that the encoder cannot take.

        If the recipe is of clips, samples of a single frame have an axis of latent frames, too.
        """

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs, on any device, to samples [N, *shape], float32, on the encoder's device.

        Inputs are uint8 RGB [N, T, Y, X, 3], with T 1 for images, or tokens, int32 [N, T], padded with `NO_TOKEN`.
        """

    def prefix(self, inputs: Tensor) -> tuple[Tensor, int | None]:
        """Return a beginning of the inputs, enough to check the encoder by, and how many of its latent frames are those
        of the whole inputs, None for all.
        """
        return inputs, None


def standardise(mean: Channels, std: Channels, pixels_N3YX: Tensor) -> Tensor:
    mean_3YX, std_3YX = (pixels_N3YX.new_tensor(each).view(3, 1, 1) for each in (mean, std))
    return pixels_N3YX.div_(255).sub_(mean_3YX).div_(std_3YX)


PIXEL_RANGES: dict[PixelRange, Callable[[Tensor], Tensor]] = {
    "signed": lambda pixels: pixels.div_(127.5).sub_(1),
    "theworld": lambda pixels: pixels,
    "unit": lambda pixels: pixels.div_(255),
    **{name: partial(standardise, *statistics) for name, statistics in COLOUR_STATISTICS.items()},
}
"""Maps of [0, 255], in place."""


def frames_in_range(
    pixels_NTYX3: Tensor, to_range: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Convert uint8 RGB to a model's range: [N, 3, T, Y, X] in `dtype`, on `device`.

    One frame of each clip is float32 at a time: a whole clip of 81 x 480 x 832 would take 388 MB.
    """
    shape = (len(pixels_NTYX3), 3, *pixels_NTYX3.shape[1:4])
    pixels_N3TYX = pixels_NTYX3.new_empty(shape, dtype=dtype, device=device)
    for number, frame_NYX3 in enumerate(pixels_NTYX3.to(device, non_blocking=True).unbind(1)):
        pixels_N3TYX[:, :, number] = to_range(frame_NYX3.permute(0, 3, 1, 2).float())
    return pixels_N3TYX


def still_in_range(pixels_NTYX3: Tensor, to_range: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Convert the only frame of uint8 RGB to a model's range: [N, 3, Y, X], float32, on `device`."""
    image_NYX3 = pixels_NTYX3.to(device, non_blocking=True)[:, 0]
    return to_range(image_NYX3.permute(0, 3, 1, 2).float())


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checks and loads models of some classes."""

    load: Callable[[ModelFiles, EncoderConfig, ImageRecipe | None], Encoder]
    refuse_size: Callable[[ModelFiles, int, int], None]
    """Raises ConfigError if the model, by its config.json, cannot take images of this height and width."""
    takes: tuple[str, ...] = ()
    """Fields in `FAMILY_FIELDS` that this family uses."""
    load_decoder: Callable[[ModelFiles, torch.device], Decoder] | None = None
    takes_clips: bool = False


@dataclass(frozen=True, kw_only=True)
class TowerLocation:
    """Where checkpoints of a class keep the vision tower."""

    kinds: tuple[str, ...] = ()
    """Model types that the tower may have, the first by default; if empty, any type."""
    prefixes: tuple[str, ...] | None = None
    """Prefixes of its weights' names, longest first; None for those of its class in transformers."""
    is_part: bool = False
    """Whether the tower's config is a section of the checkpoint's."""

    def tower_values(self, config: Mapping[str, Any]) -> Any:
        return config.get(VISION_CONFIG) if self.is_part else config


@dataclass(frozen=True, kw_only=True)
class TextLocation:
    """Where checkpoints of a class keep the text encoder."""

    runs: str
    """The class of transformers that runs."""
    names: Mapping[str, str | None]
    """Prefixes of weights' names in the checkpoint, and in the class that runs, or None for another part's."""
    padding: Padding
    """Padding as in the pipelines of diffusers, but zeros if their transformers ignore it."""
    clean: Clean = "none"
    """How a caption is cleaned in most pipelines of diffusers."""
    null_is_bare: bool = False
    """Whether the pipelines of diffusers encode the null prompt without a template."""
    config_keys: tuple[str, ...] = ()
    """Config values that its output depends on; if empty, all values of its config."""

    def name_within(self, name: str) -> str | None:
        """Map a weight's name in the checkpoint to its name in the encoder; None if it is not the encoder's."""
        found = next((each for each in self.names.items() if name.startswith(each[0])), None)
        if found is None or found[1] is None:
            return None
        return found[1] + name.removeprefix(found[0])


def accept_any_size(files: ModelFiles, height: int, width: int) -> None:
    """Refuse no size."""


def refuse_cropping(height: int, width: int, factor: int) -> None:
    if height < 1 or width < 1 or height % factor or width % factor:
        nearest = "x".join(str(max(1, round(side / factor)) * factor) for side in (height, width))
        got = f"got {height}x{width}; the nearest is {nearest}"
        raise ConfigError(f"image.height and image.width must be multiples of {factor}, {got}")


def layout_of_tokens(tokens: int, features: int) -> SampleLayout:
    shape = tokens, features
    return SampleLayout(axes=("token", "feature"), shape=shape, feature_axis="feature", has_preview=False)


def range_of_images(image: ImageRecipe | None) -> PixelRange:
    assert image is not None, "an encoder of texts"
    return cast("PixelRange", image.range)


def refuse_other_size(height: int, width: int, side: int) -> None:
    if (height, width) != (side, side):
        raise ConfigError(
            f"image.height and image.width must be {side}, as the tower was trained, got {height}x{width}"
        )
