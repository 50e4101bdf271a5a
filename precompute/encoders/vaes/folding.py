"""Parts of folded networks: 2-D layers with copies of a 3-D network's weights, compiled where asked.

`fold_still` folds the causal convolutions of diffusers' own encoders: HunyuanVideo, LTX, LTX 2, Mochi and CogVideoX pad
time by repeating its first frame, in front or on both sides. A still image is the same in all frames that a layer sees,
so the taps of time add up, and all frames that it makes are the same. Sums are made in float64. Layers between the
convolutions are diffusers', and see videos of one frame.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cache_store.errors import ConfigError
from cache_store.log import log_info
from precompute.encoders.config import EncoderConfig
from precompute.encoders.vaes.vae import Network, few_at_once

# Axes: N images, C channels, Y X cells, O I a kernel's outputs and inputs.


ConvOrLinear = TypeVar("ConvOrLinear", nn.Conv2d, nn.Linear)
Sides = tuple[int, int]
"""Of height and width."""

Weights = Mapping[str, Tensor]
"""By name, of the whole encode path or of one of its parts."""


def ready(folded: nn.Module, config: EncoderConfig) -> Network:
    """The network on its device, compiled where asked; on a CPU it gets a few images of a batch at a time."""
    if config.compiles:
        refuse_without_compiler(config.torch_device)
    folded = folded.to(config.torch_device).eval()
    if config.compiles:
        compile_blocks(folded)
    return few_at_once(folded) if config.torch_device.type == "cpu" else folded


def compile_blocks(folded: nn.Module) -> None:
    """Have each block compiled when it first runs: blocks of one shape share the result, which the whole could not.

    Inductor keeps what it made in TORCHINDUCTOR_CACHE_DIR, so that later workers and builds start sooner.
    """
    log_info("compiling the encoder's blocks, which takes a minute the first time on a machine")
    for part in folded.children():
        for block in part if isinstance(part, nn.Sequential) else ():
            block.compile(dynamic=False)


def refuse_without_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile finds no compiler: known before a cache is begun, not at its first image."""
    from torch._dynamo.exc import TorchDynamoException  # what torch.compile raises, whichever part of it fails

    try:
        torch.compile(torch.square)(torch.ones(1, device=device))
    except TorchDynamoException as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton"
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"encoder.compile: torch.compile does not work here ({problem}); "
            f"install {needed}, or set encoder.compile: false"
        ) from error


def below(weights: Weights, part: str) -> Weights:
    """The weights of a part, by the rest of their names."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def flat_conv(
    weight_OIYX: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    stride: Sides = (1, 1),
    padding: Sides | None = None,
    padding_mode: str = "zeros",
) -> nn.Module:
    """A frozen convolution of these weights, copied; Wan pads 3x3 by one unless it strides."""
    outputs, inputs, height, width = weight_OIYX.shape
    if height == width == 1:
        return copied(ChannelLinear(inputs, outputs, device="meta"), weight_OIYX[:, :, 0, 0], bias, dtype)
    if padding is None:
        padding = (height // 2, width // 2) if stride == (1, 1) else (0, 0)
    flat = nn.Conv2d(
        inputs,
        outputs,
        (height, width),
        stride=stride,
        padding=padding,
        padding_mode=padding_mode,  # type: ignore[arg-type]  # as diffusers' own layer has it
        device="meta",
    )
    return copied(flat, weight_OIYX.contiguous(memory_format=torch.channels_last), bias, dtype)


class ChannelLinear(nn.Linear):
    """A 1x1 convolution: as a matrix product its bits do not depend on the number of threads, as conv2d's do."""

    def forward(self, x_NCYX: Tensor) -> Tensor:
        return super().forward(x_NCYX.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def copied(layer: ConvOrLinear, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> ConvOrLinear:
    """`layer` with frozen copies of these parameters."""
    layer.weight = nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
    layer.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)
    return layer


# Axes: N images, C channels, T frames, Y X cells, O I a kernel's outputs and inputs.


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
