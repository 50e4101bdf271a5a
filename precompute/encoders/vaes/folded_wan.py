"""The encoder of Wan-like VAEs for still images: the 3-D network folded, exactly, into a 2-D one.

Wan's causal convolutions left-pad time with zeros, so on a single frame only the last temporal tap sees anything but
zeros: a `Conv3d` is the `Conv2d` of `W[:, :, -1]`, temporal resampling is skipped on the first frame, and
attention is per frame. In the residual form, shortcuts average frames too; all but the last are zeros. The 2-D network
runs channels-last, and its weights have diffusers' names. Diffusers is not imported, because that takes several
seconds per process, and the decoder, more than half of a checkpoint, is not read.

Measured and left out, each under 3 %: oneDNN-packed weights, the residual sum fused into the convolution, an
asymmetric padding in place of pad and convolve.
"""

# Axes: N images, C channels, Y X cells of the stage at hand, P pixels of a block, T tokens (Y·X) of attention.

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache_store.format.array import Normalization
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, refuse_incomplete
from precompute.encoders.vaes.folding import ChannelLinear, prepare_network
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.vaes.vae import FrozenVae, add_alpha
from precompute.encoders.weights import DIFFUSERS_FILES, model_errors, read_weights, weights_sha256

SMALLEST_LENGTH = 1e-12
"""Floor of a channel vector's length, as in `F.normalize`."""


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """The config values that an encode path and its normalisation depend on, with diffusers' defaults."""

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[int | float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    in_channels: int = 3
    patch_size: int | None = None
    latents_mean: tuple[float, ...] = (
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    )
    latents_std: tuple[float, ...] = (
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    )

    @property
    def values(self) -> dict[str, Any]:
        """Return the values by diffusers' names, in any of the classes."""
        return {**asdict(self), "input_channels": self.in_channels}


DEFAULTS: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {},
    "AutoencoderKLQwenImage": {},
    "AutoencoderKLQwenImage21": {
        "z_dim": 64,
        "dim_mult": (1, 2, 4, 8, 8),
        "temperal_downsample": (False, True, True, True),
        "is_residual": True,
        "in_channels": 4,
        "latents_mean": (),
        "latents_std": (),
    },
}
"""Defaults of a class that differ; diffusers' 64 means of the last one must be in its config.json."""


def wan_config(files: ModelFiles) -> WanConfig:
    held = {**DEFAULTS[files.class_name], **files.config}
    if "input_channels" in held:
        held["in_channels"] = held["input_channels"]
    return msgspec.convert(held, WanConfig)


def folded_wan(files: ModelFiles, kind: VaeKind, config: EncoderConfig) -> FrozenVae:
    """Load the frozen encode path of the model in `files`, and fold it; raise ModelError unless it is whole."""
    with model_errors(files):
        held = wan_config(files)
        normalization = Normalization(latents_mean=held.latents_mean, latents_std=held.latents_std)
        refuse_other_lengths(files, kind, normalization, held.z_dim)
        named = read_weights(
            files, DIFFUSERS_FILES, lambda name: name if name.startswith(kind.encode_weights) else None
        )
        weights = {name: weight.to(torch.float32) for name, weight in named}
        folded = FoldedWanEncoder(held, config.torch_dtype)
        report = folded.load_state_dict(fold_weights(weights, held.patch_size or 1), strict=False)
    refuse_incomplete(files, {**report._asdict(), "mismatched_keys": ()}, "encode path", kind.encode_weights)
    return FrozenVae(
        network=prepare_network(folded, folded.blocks, config),
        class_name=files.class_name,
        weights_sha256=weights_sha256(files.class_name, held.values, kind.encode_config, weights.items()),
        kind=kind,
        config=held.values,
        normalization=normalization,
        is_folded=True,
    )


def fold_weights(weights: Mapping[str, Tensor], patch: int) -> dict[str, Tensor]:
    """Fold each weight for a first frame, before which a kernel of k frames sees k-1 frames of zeros."""
    folded = {name: fold_weight(weight) for name, weight in weights.items() if ".time_conv." not in name}
    if patch > 1 and (weight := folded.get("encoder.conv_in.weight")) is not None:
        # from diffusers' order of a patch's pixels, by columns, to that of `pixel_unshuffle`
        columns = weight.reshape(len(weight), -1, patch, patch, *weight.shape[2:])
        folded["encoder.conv_in.weight"] = columns.transpose(2, 3).reshape(weight.shape)
    return folded


def fold_weight(weight: Tensor) -> Tensor:
    if weight.dim() == 5:  # Qwen-Image 2.1 has kernels without time
        weight = weight[:, :, -1]
    is_vector = weight.shape[1:].numel() == 1
    return weight.flatten() if is_vector else weight[:, :, 0, 0] if weight.shape[2:] == (1, 1) else weight


class FoldedWanEncoder(nn.Module):
    """Encoder and `quant_conv` of an `AutoencoderKLWan` for one frame; its weights are not set yet."""

    def __init__(self, config: WanConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch, self.has_alpha = config.patch_size or 1, config.in_channels // (config.patch_size or 1) ** 2 > 3
        widths = [config.base_dim * multiple for multiple in (1, *config.dim_mult)]
        last, moments = widths[-1], 2 * config.z_dim
        with torch.device("meta"):
            downs = [*down_blocks(config, widths)]
            resnets = nn.ModuleList([WanResidualBlock(last, last), WanResidualBlock(last, last)])
            attentions = nn.ModuleList([WanAttentionBlock(last)])
            self.encoder = nn.ModuleDict(
                {
                    "conv_in": conv(config.in_channels, widths[0]),
                    "down_blocks": nn.ModuleList(downs),
                    "mid_block": nn.ModuleDict({"resnets": resnets, "attentions": attentions}),
                    "norm_out": RMSNorm(last),
                    "conv_out": conv(last, moments),
                }
            )
            self.quant_conv = ChannelLinear(moments, moments)
        self.blocks = [*downs, resnets[0], attentions[0], resnets[1]]
        self.to_empty(device="cpu").to(dtype).requires_grad_(False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to its stubs

    def forward(self, image_N3YX: Tensor) -> Tensor:
        """Map RGB, in the compute dtype, to the posterior's mean and log-variance: [N, 2C, Y/8, X/8], or Y/16, X/16."""
        if self.has_alpha:
            image_N3YX = add_alpha(image_N3YX)
        if self.patch > 1:
            image_N3YX = F.pixel_unshuffle(image_N3YX, self.patch)
        x_NCYX = self.encoder["conv_in"](image_N3YX.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x_NCYX = block(x_NCYX)
        return self.quant_conv(self.encoder["conv_out"](self.encoder["norm_out"](x_NCYX, silu=True)))  # type: ignore[no-any-return]


def down_blocks(config: WanConfig, widths: list[int]) -> Iterator[nn.Module]:
    """Yield each level's residual blocks, some followed by attention, then the layer that halves height and width."""
    for level, (inputs, outputs) in enumerate(pairwise(widths)):
        halves = level < len(config.dim_mult) - 1
        if config.is_residual:
            in_time = halves and config.temperal_downsample[level]
            yield ResidualDownBlock(inputs, outputs, config.num_res_blocks, halves, in_time)
            continue
        for block in range(config.num_res_blocks):
            yield WanResidualBlock(outputs if block else inputs, outputs)
            if 0.5**level in config.attn_scales:
                yield WanAttentionBlock(outputs)
        if halves:
            yield WanHalving(outputs)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class RMSNorm(nn.Module):
    """Scales each pixel's channel vector to RMS 1, times a gain; then SiLU if asked."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x_NCYX: Tensor, silu: bool) -> Tensor:
        x_NYXC = x_NCYX.permute(0, 2, 3, 1).contiguous()  # no copy after a channels-last layer
        y_NYXC = F.rms_norm(x_NYXC, self.gamma.shape, self.gamma, eps=SMALLEST_LENGTH**2)
        return (F.silu(y_NYXC, inplace=True) if silu else y_NYXC).permute(0, 3, 1, 2)


class WanResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice; added to the input, or to a 1x1 convolution of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = RMSNorm(inputs), conv(inputs, outputs)
        self.norm2, self.conv2 = RMSNorm(outputs), conv(outputs, outputs)
        self.conv_shortcut = nn.Identity() if inputs == outputs else ChannelLinear(inputs, outputs)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        y_NCYX = self.conv1(self.norm1(x_NCYX, silu=True))
        y_NCYX = self.conv2(self.norm2(y_NCYX, silu=True))
        return y_NCYX.add_(self.conv_shortcut(x_NCYX))  # type: ignore[no-any-return]


class WanAttentionBlock(nn.Module):
    """Single-head self-attention over the cells of one image, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels)
        self.to_qkv, self.proj = ChannelLinear(channels, 3 * channels), ChannelLinear(channels, channels)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        qkv_NYXC = self.to_qkv(self.norm(x_NCYX, silu=False)).permute(0, 2, 3, 1)
        query_N1TC, key_N1TC, value_N1TC = qkv_NYXC.flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        y_N1TC = F.scaled_dot_product_attention(query_N1TC, key_N1TC, value_N1TC)
        y_NYXC = y_N1TC.reshape(*qkv_NYXC.shape[:3], -1)
        return self.proj(y_NYXC.permute(0, 3, 1, 2)).add_(x_NCYX)  # type: ignore[no-any-return]


class WanHalving(nn.Module):
    """The layer that halves height and width, without `time_conv`, which needs a second frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))

    def forward(self, x_NCYX: Tensor) -> Tensor:
        return self.resample(x_NCYX)  # type: ignore[no-any-return]


class ResidualDownBlock(nn.Module):
    """Residual blocks that may end in a halving, added to an average of the inputs of each output cell."""

    def __init__(self, inputs: int, outputs: int, blocks: int, halves: bool, in_time: bool) -> None:
        super().__init__()
        self.resnets = nn.Sequential(
            *(WanResidualBlock(outputs if each else inputs, outputs) for each in range(blocks))
        )
        self.downsampler = WanHalving(outputs) if halves else nn.Identity()
        self.side, self.frames, self.outputs = 2 if halves else 1, 2 if in_time else 1, outputs

    def forward(self, x_NCYX: Tensor) -> Tensor:
        shortcut_NCYX = self.average(x_NCYX)
        return self.downsampler(self.resnets(x_NCYX)) + shortcut_NCYX  # type: ignore[no-any-return]

    def average(self, x_NCYX: Tensor) -> Tensor:
        """Average as diffusers' `AvgDown3D`: cells and frames become channels, and neighbouring channels one.

        If it takes two frames, the first is zeros, so some channels are zeros, or halved.
        """
        number, channels, height, width = x_NCYX.shape
        sides = height // self.side, width // self.side
        cells = F.pixel_unshuffle(x_NCYX, self.side).view(number, channels, 1, self.side**2, *sides)
        frames = F.pad(cells, (0, 0, 0, 0, 0, 0, self.frames - 1, 0))
        return frames.reshape(number, self.outputs, -1, *sides).mean(2)
