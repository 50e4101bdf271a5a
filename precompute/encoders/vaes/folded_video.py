"""Other video VAEs for still images: diffusers' own encoder, whose causal convolutions are folded into 2-D ones.

HunyuanVideo, LTX, LTX2, Mochi and CogVideoX pad time by repeating its first frame, in front or on both sides. A still
image is the same in all frames that a layer sees, so that the taps of time add up, and all frames that it makes are the
same. Sums are made in float64. Whatever stands between the convolutions is diffusers', and sees videos of one frame.
"""

# Axes: N images, C channels, T frames, Y X cells, O I a kernel's outputs and inputs.

from typing import Any

import torch
from torch import Tensor, nn

from precompute.encoders.vaes.folding import flat_conv

HAS_CACHE = {
    "HunyuanVideoCausalConv3d": False,
    "LTXVideoCausalConv3d": False,
    "LTX2VideoCausalConv3d": False,
    "CogVideoXCausalConv3d": True,
}
"""Diffusers' causal convolutions that repeat the first frame; whether they return what later frames need, too."""


class StillConv(nn.Module):
    """A causal convolution over a video that stands still: over one frame, all taps of time in one."""

    def __init__(self, causal: Any, dtype: torch.dtype) -> None:
        super().__init__()
        conv: Any = causal.conv
        padding, mode = conv.padding[1:], conv.padding_mode
        if getattr(causal, "pad_mode", "") == "replicate":  # it pads all axes, before its convolution
            across, _, down, *_ = causal.time_causal_padding
            padding, mode = (down, across), "replicate"
        self.step, *strides = conv.stride
        self.flat = flat_conv(conv.weight.double().sum(2), conv.bias, dtype, tuple(strides), padding, mode)
        self.has_cache = HAS_CACHE[type(causal).__name__]

    def forward(self, x_NCTYX: Tensor, *_: Any, **__: Any) -> Any:
        """Map equal frames [N, I, T, Y, X] to equal frames, as diffusers' layer would; no cache is kept."""
        frames = -(-x_NCTYX.shape[2] // self.step)
        made_NCTYX = self.flat(x_NCTYX[:, :, 0]).unsqueeze(2).expand(-1, -1, frames, -1, -1)
        return (made_NCTYX, None) if self.has_cache else made_NCTYX


def fold_still(encoder: nn.Module, dtype: torch.dtype) -> None:
    """Put a 2-D convolution into the place of each causal one, in diffusers' encoder of a video VAE."""
    for module in list(encoder.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in HAS_CACHE:
                setattr(module, name, StillConv(child, dtype))
