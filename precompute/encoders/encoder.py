"""A frozen encoder as the build sees it: a batch of uint8 pixels in, float32 samples out.

Everything that changes a sample is in `identity`, or in the image recipe that named the pixel range.
"""

# Axes: N images, Y X pixels.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from cache_store.format.schema import EncoderIdentity, SampleLayout

if TYPE_CHECKING:  # what decides and reports knows encoders, and needs no torch
    import torch
    from torch import Tensor

PixelRange = Literal["signed", "theworld"]


class Encoder(Protocol):
    """Maps uint8 RGB to samples, on one device."""

    device: torch.device
    identity: EncoderIdentity

    def layout(self, height: int, width: int) -> SampleLayout:
        """What it makes of one image of that size; ConfigError for a size that it would have to crop."""

    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, *shape], float32, on the encoder's device."""


def to_signed(pixels: Tensor) -> Tensor:
    """Map [0, 255] to [-1, 1], in place: the range that encoders were trained on."""
    return pixels.div_(127.5).sub_(1)


def to_theworld(pixels: Tensor) -> Tensor:
    """Leave [0, 255] as it is, to reproduce what TheWorld feeds its VAE."""
    return pixels


PIXEL_RANGES: dict[PixelRange, Callable[[Tensor], Tensor]] = {"signed": to_signed, "theworld": to_theworld}
