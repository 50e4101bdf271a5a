"""Parts of folded networks: 2-D layers with copies of a 3-D network's weights, perhaps compiled.

`fold_still` folds the causal convolutions in diffusers' own encoders: HunyuanVideo, LTX, LTX 2, Mochi, CogVideoX and
Cosmos 1.0 pad time by repeating the first frame, in front or on both sides. In a still image all frames that a layer
sees are equal, so its temporal taps can be summed (in float64), and all frames that it makes are equal. The other
layers stay diffusers' and see videos of one frame.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache_store.errors import ConfigError
from cache_store.log import log_info
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.vaes.vae import Network, split_batches

# Axes: N images, C channels, T frames, Y X cells, O I a kernel's outputs and inputs.

MAX_SIZES = 4_096
"""Image sizes for which a block is compiled; torch would compile eight, and run the others uncompiled."""


def prepare_network(folded: nn.Module, blocks: Iterable[nn.Module], config: EncoderConfig) -> Network:
    """Move the network to its device, compile its blocks if configured, and on a CPU split its batches."""
    if config.compiles:
        refuse_without_compiler(config.torch_device)
    folded = folded.to(config.torch_device).eval()
    if config.compiles:
        compile_blocks(blocks)
    return split_batches(folded) if config.torch_device.type == "cpu" else folded


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block when it first runs; Inductor keeps the results in TORCHINDUCTOR_CACHE_DIR."""
    log_info("compiling the encoder's blocks, which takes a minute the first time on a machine")
    for block in blocks:
        block.compile(dynamic=False)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_SIZES


def refuse_without_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile does not work, before a cache is started."""
    from torch._dynamo.exc import TorchDynamoException  # the base of all errors of torch.compile

    try:
        torch.compile(torch.square)(torch.ones(1, device=device))
    except TorchDynamoException as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton"
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"encoder.compile: torch.compile does not work here ({problem}); "
            f"install {needed}, or set encoder.compile: false"
        ) from error


def flat_conv(
    weight_OIYX: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    stride: tuple[int, int],
    padding: tuple[int, int],
    padding_mode: str,
) -> nn.Module:
    outputs, inputs, height, width = weight_OIYX.shape
    layer: nn.Module
    if height == width == 1:
        layer, weight = ChannelLinear(inputs, outputs, device="meta"), weight_OIYX[:, :, 0, 0]
    else:
        layer = nn.Conv2d(
            inputs,
            outputs,
            (height, width),
            stride=stride,
            padding=padding,
            padding_mode=padding_mode,  # type: ignore[arg-type]  # as diffusers' own layer has it
            device="meta",
        )
        weight = weight_OIYX.contiguous(memory_format=torch.channels_last)
    layer.weight = nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
    layer.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)
    return layer


class ChannelLinear(nn.Linear):
    """A 1x1 convolution as a matrix product, whose bits, unlike conv2d's, do not depend on the number of threads."""

    def forward(self, x_NCYX: Tensor) -> Tensor:
        return super().forward(x_NCYX.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


HAS_CACHE = {
    "HunyuanVideoCausalConv3d": False,
    "LTXVideoCausalConv3d": False,
    "LTX2VideoCausalConv3d": False,
    "CogVideoXCausalConv3d": True,
    "CosmosCausalConv3d": False,
}
"""Diffusers' causal convolutions that repeat the first frame, and whether they also return a cache for later frames."""


class StillConv(nn.Module):
    """A causal convolution over a video of equal frames: a 2-D convolution with the sum of all temporal taps."""

    def __init__(self, causal: Any, dtype: torch.dtype) -> None:
        super().__init__()
        conv: Any = getattr(causal, "conv", causal)
        padding, mode = getattr(causal, "spatial_pad", conv.padding[1:])[:2], conv.padding_mode
        if getattr(causal, "pad_mode", "") == "replicate":  # Mochi-like layers pad all axes before the convolution
            across, _, down, *_ = causal.time_causal_padding
            padding, mode = (down, across), "replicate"
        self.step, *strides = conv.stride
        self.flat = flat_conv(conv.weight.double().sum(2), conv.bias, dtype, tuple(strides), padding, mode)
        self.has_cache = HAS_CACHE[type(causal).__name__]

    def forward(self, x_NCTYX: Tensor, *_: Any, **__: Any) -> Any:
        """Map equal frames to equal frames, as diffusers' layer would; no cache is kept."""
        frames = -(-x_NCTYX.shape[2] // self.step)
        made_NCTYX = self.flat(x_NCTYX[:, :, 0]).unsqueeze(2).expand(-1, -1, frames, -1, -1)
        return (made_NCTYX, None) if self.has_cache else made_NCTYX


class StillHalving(nn.Module):
    """Cosmos 1.0's layer that halves sides, and time, over one frame: 3-D averages lack bfloat16 on a CPU."""

    def __init__(self, down: Any) -> None:
        super().__init__()
        self.down = down

    def forward(self, x_NCTYX: Tensor) -> Tensor:
        down: Any = self.down
        if down.spatial_downsample:
            x_NCTYX = F.pad(x_NCTYX, (0, 1, 0, 1, 0, 0))
            x_NCTYX = down.conv1(x_NCTYX) + F.avg_pool2d(x_NCTYX[:, :, 0], 2).unsqueeze(2)
        if down.temporal_downsample:
            x_NCTYX = down.conv2(x_NCTYX) + x_NCTYX
        made_NCTYX: Tensor = down.conv3(x_NCTYX)
        return made_NCTYX


def fold_still(encoder: nn.Module, dtype: torch.dtype) -> None:
    """Replace each causal convolution in diffusers' encoder of a video VAE with a 2-D one."""
    for module in list(encoder.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in HAS_CACHE:
                setattr(module, name, StillConv(child, dtype))
            elif type(child).__name__ == "CosmosDownsample3d":
                setattr(module, name, StillHalving(child))
