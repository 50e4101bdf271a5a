"""An example of your own encoder: each patch's mean colour and contrast, as tokens. It needs no weights.

    PYTHONPATH=examples precompute build --encoder.model own_encoder:PatchColours --cache … --source.kind …

`precompute` does the rest: decoding, batches, shards, resuming, sealing; `audit` checks that the encoder still gives
the same samples.
"""

# Axes: N images, Y X pixels, T tokens, F features, P a patch's pixels.

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH = 16


class PatchColours:
    """Encodes each patch of 16 x 16 pixels as three means and three deviations."""

    identity = "patch colours, version 1"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Do nothing: there are no weights to put on the device."""

    def layout(self, size: tuple[int, int, int]) -> dict[str, int]:
        frames, height, width = size
        if frames > 1:
            raise ValueError("colours are those of one frame; leave clip out")
        if height % PATCH or width % PATCH:
            raise ValueError(f"image.height and image.width must be multiples of {PATCH}, got {height}x{width}")
        return {"token": height // PATCH * (width // PATCH), "feature": 6}

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        image_N3YX = pixels_N3TYX[:, :, 0]  # an image is a clip of one frame
        patches_N3PT = F.unfold(image_N3YX, PATCH, stride=PATCH).unflatten(1, (3, -1))
        means_N3T, deviations_N3T = patches_N3PT.mean(2), patches_N3PT.std(2)
        return torch.cat([means_N3T, deviations_N3T], 1).transpose(1, 2)
