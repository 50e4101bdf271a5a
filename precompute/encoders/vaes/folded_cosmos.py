"""The encoder of Cosmos 1.0 for still images: the 3-D network folded, exactly, into a 2-D one with fewer layers.

Its causal convolutions pad time by repeating the first frame, so on a single frame all temporal taps meet the same
values and add up. A convolution over space and the one over time behind it have nothing between them, so both are one;
a halving of space, of time, the averages beside them and the 1x1 convolution behind are one; attention over one frame
is a linear map. Of the wavelets that cut an image into patches all that are high in time are zero, and the others are
a linear map of the patch's pixels, which the first convolution takes in. Products are made in float64.
"""

# Axes: N images, C channels, Y X cells of the stage at hand, T tokens (Y·X) of attention, O I outputs and inputs.

from collections.abc import Iterator
from itertools import count, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precompute.encoders.config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.diffusers_vae import encode_path_sha256, read_whole_vae
from precompute.encoders.vaes.folding import Weights, below, flat_conv, ready
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.vaes.vae import FrozenVae
from precompute.encoders.weights import loading

NORM_EPS = 1e-6


def folded_cosmos(files: ModelFiles, kind: VaeKind, config: EncoderConfig) -> FrozenVae:
    """The frozen encode path of the model in `files`, folded; diffusers reads it."""
    vae = read_whole_vae(files, {"encode path": kind.encode_weights})
    with loading(files):
        weights = {name: each for name, each in vae.state_dict().items() if name.startswith(kind.encode_weights)}
        normalization = kind.normalization(vae.config, weights)
        refuse_other_lengths(files, kind, normalization, vae.config[kind.channels])
        patch = patch_matrix(vae.config["patch_size"], vae.config["patch_type"], vae.config["in_channels"])
        folded = FoldedCosmosEncoder(weights, patch, config.torch_dtype)
    return FrozenVae(
        network=ready(folded, config),
        class_name=files.class_name,
        weights_sha256=encode_path_sha256(files, kind, vae.config, weights),
        spatial_factor=kind.spatial_factor(vae.config),
        channels=vae.config[kind.channels],
        normalization=normalization,
        has_posterior=False,
        is_folded=True,
        is_compilable=True,
    )


def patch_matrix(side: int, method: str, channels: int) -> Tensor:
    """The matrix from a still image's pixels to the values of their patch: [C·side³, C·side²], float64.

    Pixels are in the order of `pixel_unshuffle`.
    """
    pixels = torch.eye(channels * side**2, dtype=torch.float64).view(-1, channels, side, side)
    if method == "rearrange":
        return pixels.unsqueeze(2).expand(-1, -1, side, -1, -1).flatten(1).T
    while pixels.shape[-1] > 1:
        pixels = wavelets(pixels)
    return pixels.flatten(1).T


def wavelets(image_NCYX: Tensor) -> Tensor:
    """One level of diffusers' 3-D Haar transform, rescaled, of an image that stands still: [N, 8C, Y/2, X/2]."""
    left, right = image_NCYX[..., 0::2], image_NCYX[..., 1::2]
    across = (left + right, left - right)
    low, high = ((each[..., 0::2, :] + each[..., 1::2, :], each[..., 0::2, :] - each[..., 1::2, :]) for each in across)
    bands = torch.cat([low[0], high[0], low[1], high[1]], 1) / 4
    return torch.cat([bands, torch.zeros_like(bands)], 1)


class FoldedCosmosEncoder(nn.Module):
    """Encoder and `quant_conv` of an `AutoencoderKLCosmos`, for one frame, by diffusers' names of its weights."""

    def __init__(self, weights: Weights, patch: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        encoder = below(weights, "encoder")
        self.patch = round(len(patch) / patch.shape[1])
        self.conv_in = flat_conv(*joined_conv(below(encoder, "conv_in"), patch), dtype)
        blocks = takewhile(bool, (below(encoder, f"down_blocks.{number}") for number in count()))
        layers = [layer for block in blocks for layer in fold_block(block, dtype)]
        self.down_blocks = nn.Sequential(*layers)
        self.mid_block = nn.Sequential(*fold_block(below(encoder, "mid_block"), dtype))
        self.norm_out = GroupNorm(below(encoder, "norm_out.norm"))
        conv_out = then(joined_conv(below(encoder, "conv_out")), *summed(weights, "quant_conv"))
        self.conv_out = flat_conv(*conv_out, dtype)

    def forward(self, image_N3YX: Tensor) -> Tensor:
        """Map RGB, in the compute dtype, to latents: [N, C, Y/8, X/8], or Y/16, X/16."""
        patches = F.pixel_unshuffle(image_N3YX, self.patch).contiguous(memory_format=torch.channels_last)
        x_NCYX = self.mid_block(self.down_blocks(self.conv_in(patches)))
        return self.conv_out(F.silu(self.norm_out(x_NCYX)))  # type: ignore[no-any-return]


def fold_block(weights: Weights, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Residual blocks, each but the last of a middle block with attention behind it; then what halves the sides."""
    for number in count():
        if not (residual := below(weights, f"resnets.{number}")):
            break
        yield ResidualBlock(residual, dtype)
        if attention := below(weights, f"attentions.{number}"):
            yield AttentionBlock(attention, dtype)
            yield OneFrameAttention(below(weights, f"temp_attentions.{number}"), dtype)
    if downsampler := below(weights, "downsamplers.0"):
        yield fold_downsampler(downsampler, dtype)


class GroupNorm(nn.Module):
    """Normalise all values of an image together."""

    gain_C: Tensor
    bias_C: Tensor

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.register_buffer("gain_C", weights["weight"].detach().clone())
        self.register_buffer("bias_C", weights["bias"].detach().clone())

    def forward(self, x_NCYX: Tensor) -> Tensor:
        gain_C, bias_C = self.gain_C.to(x_NCYX.dtype), self.bias_C.to(x_NCYX.dtype)
        return F.group_norm(x_NCYX, 1, gain_C, bias_C, eps=NORM_EPS)


class ResidualBlock(nn.Module):
    """Twice norm, SiLU, convolution; beside it the input, or a 1x1 convolution of it."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = (GroupNorm(below(weights, f"{name}.norm")) for name in ("norm1", "norm2"))
        self.conv1, self.conv2 = (flat_conv(*joined_conv(below(weights, name)), dtype) for name in ("conv1", "conv2"))
        widens = "conv_shortcut.weight" in weights
        self.shortcut = point_conv(*summed(weights, "conv_shortcut"), dtype) if widens else nn.Identity()

    def forward(self, x_NCYX: Tensor) -> Tensor:
        y_NCYX = self.conv1(F.silu(self.norm1(x_NCYX)))
        y_NCYX = self.conv2(F.silu(self.norm2(y_NCYX)))
        return y_NCYX + self.shortcut(x_NCYX)  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """Single-head self-attention over the cells of one image, added to its input."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = GroupNorm(below(weights, "norm.norm"))
        matrices, biases = zip(*(summed(weights, name) for name in ("to_q", "to_k", "to_v")), strict=True)
        self.to_qkv = point_conv(torch.cat(matrices), torch.cat(biases), dtype)
        self.to_out = point_conv(*summed(weights, "to_out.0"), dtype)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        qkv_NYXC = self.to_qkv(self.norm(x_NCYX)).permute(0, 2, 3, 1)
        query_N1TC, key_N1TC, value_N1TC = qkv_NYXC.flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        y_N1TC = F.scaled_dot_product_attention(query_N1TC, key_N1TC, value_N1TC)
        y_NYXC = y_N1TC.reshape(*qkv_NYXC.shape[:3], -1)
        return self.to_out(y_NYXC.permute(0, 3, 1, 2)) + x_NCYX  # type: ignore[no-any-return]


class OneFrameAttention(nn.Module):
    """Attention over time, of which a still image has one frame: its value, whatever query and key are."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = GroupNorm(below(weights, "norm.norm"))
        (value, value_bias), (out, out_bias) = (summed(weights, name) for name in ("to_v", "to_out.0"))
        self.value = point_conv(out @ value, out @ value_bias + out_bias, dtype)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        return self.value(self.norm(x_NCYX)) + x_NCYX  # type: ignore[no-any-return]


Conv = tuple[Tensor, Tensor]
"""Kernel [O, I, Y, X] and bias [O] of a convolution, float64."""


def joined_conv(weights: Weights, patch: Tensor | None = None) -> Conv:
    """A convolution over space, of what a matrix makes of its input where one is given, and that over time behind."""
    kernel = weights["conv_s.weight"].double().squeeze(2)
    if patch is not None:
        kernel = torch.einsum("opyx,pi->oiyx", kernel, patch)
    return then((kernel, weights["conv_s.bias"].double()), *summed(weights, "conv_t"))


def summed(weights: Weights, name: str) -> Conv:
    """Add up the taps of a convolution over time, which all meet the same frame: [O, I] and [O]."""
    return weights[f"{name}.weight"].double().sum((2, 3, 4)), weights[f"{name}.bias"].double()


def then(conv: Conv, matrix_OI: Tensor, bias_O: Tensor) -> Conv:
    """A convolution with a linear map of its outputs behind it."""
    kernel, bias = conv
    return torch.einsum("om,miyx->oiyx", matrix_OI, kernel), matrix_OI @ bias + bias_O


def fold_downsampler(weights: Weights, dtype: torch.dtype) -> nn.Module:
    """Halve the sides, where it does, and time: the convolutions, the averages beside them and the 1x1 behind."""
    outputs = len(weights["conv3.bias"])
    same = torch.eye(outputs, dtype=torch.float64)
    conv: Conv = (same[:, :, None, None], torch.zeros(outputs, dtype=torch.float64))
    halves = "conv1.weight" in weights
    if halves:
        kernel = weights["conv1.weight"].double().squeeze(2).clone()
        kernel[:, :, :2, :2] += same[:, :, None, None] / 4
        conv = kernel, weights["conv1.bias"].double()
    if "conv2.weight" in weights:
        matrix, bias = summed(weights, "conv2")
        conv = then(conv, matrix + same, bias)
    conv = then(conv, *summed(weights, "conv3"))
    if not halves:
        return flat_conv(*conv, dtype)
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), flat_conv(*conv, dtype, stride=(2, 2)))


def point_conv(matrix_OI: Tensor, bias_O: Tensor, dtype: torch.dtype) -> nn.Module:
    return flat_conv(matrix_OI[:, :, None, None], bias_O, dtype)
