"""A frozen encoder as the build sees it: a batch of uint8 pixels in, float32 samples out.

Everything that changes a sample is in `identity`, or in the image recipe that named the pixel range.
"""

# Axes: N images, Y X pixels.

from __future__ import annotations

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
