"""A family of encoders: facts that are known before torch is imported, and how its models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache_store.errors import ConfigError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from precompute.encoders.model_files import ModelFiles

    Decoder = tuple[Callable[[Tensor], Tensor], str]
    """From latents to RGB in [-1, 1], and the SHA-256 of the encode path that its weights came with."""


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
