"""The encoder of Cosmos 1.0 for still images: the 3-D network folded, exactly, into a 2-D one with fewer layers.

Its causal convolutions pad time by repeating the first frame, so on a single frame all temporal taps see the same
values and can be summed. These layers become one convolution each: a convolution over space and the one over time after
it; and a halving of space and time, with the averages beside it and the 1x1 convolution after it. Attention over one
frame is a linear map. Wavelets cut an image into patches: those with a high frequency in time are zero, and the others
are a linear map of the patch's pixels, which is multiplied into the first convolution. Products are made in float64.
"""

# Axes: N images, C channels, Y X cells of the stage at hand, T tokens (Y·X) of attention, O I outputs and inputs.

from collections.abc import Iterator
from itertools import count, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.diffusers_vae import encode_path_sha256, read_whole_vae
from precompute.encoders.vaes.folding import Weights, flat_conv, prepare_network, weights_of_part
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.vaes.vae import FrozenVae
from precompute.encoders.weights import model_errors

NORM_EPS = 1e-6


def folded_cosmos(files: ModelFiles, kind: VaeKind, config: EncoderConfig) -> FrozenVae:
    """Load the frozen encode path of the model in `files` with diffusers, and fold it."""
    vae = read_whole_vae(files, {"encode path": kind.encode_weights})
    with model_errors(files):
        weights = {name: each for name, each in vae.state_dict().items() if name.startswith(kind.encode_weights)}
        normalization = kind.normalization(vae.config, weights, False)
        refuse_other_lengths(files, kind, normalization, vae.config[kind.channels])
        patch = patch_matrix(vae.config["patch_size"], vae.config["patch_type"], vae.config["in_channels"])
        folded = FoldedCosmosEncoder(weights, patch, config.torch_dtype)
    return FrozenVae(
        network=prepare_network(folded, config),
        class_name=files.class_name,
        weights_sha256=encode_path_sha256(files, kind, vae.config, weights),
        spatial_factor=kind.spatial_factor(vae.config),
        multiple=kind.multiple(vae.config),
        channels=vae.config[kind.channels],
        normalization=normalization,
        has_posterior=False,
        is_folded=True,
        is_compilable=True,
    )


def patch_matrix(side: int, method: str, channels: int) -> Tensor:
    """Make the matrix [C·side³, C·side²], float64, from a patch's pixels to its values.

    Pixels are in the order of `pixel_unshuffle`.
    """
    pixels = torch.eye(channels * side**2, dtype=torch.float64).view(-1, channels, side, side)
    if method == "rearrange":
        return pixels.unsqueeze(2).expand(-1, -1, side, -1, -1).flatten(1).T
    while pixels.shape[-1] > 1:
        pixels = wavelets(pixels)
    return pixels.flatten(1).T


def wavelets(image_NCYX: Tensor) -> Tensor:
    """Apply one level of diffusers' 3-D Haar transform, rescaled, to a still image: [N, 8C, Y/2, X/2]."""
    left, right = image_NCYX[..., 0::2], image_NCYX[..., 1::2]
    across = (left + right, left - right)
    low, high = ((each[..., 0::2, :] + each[..., 1::2, :], each[..., 0::2, :] - each[..., 1::2, :]) for each in across)
    bands = torch.cat([low[0], high[0], low[1], high[1]], 1) / 4
    return torch.cat([bands, torch.zeros_like(bands)], 1)


class FoldedCosmosEncoder(nn.Module):
    """Encoder and `quant_conv` of an `AutoencoderKLCosmos` for one frame, made from weights by diffusers' names."""

    def __init__(self, weights: Weights, patch: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        encoder = weights_of_part(weights, "encoder")
        self.patch = round(len(patch) / patch.shape[1])
        self.conv_in = flat_conv(*join_convs(weights_of_part(encoder, "conv_in"), patch), dtype)
        blocks = takewhile(bool, (weights_of_part(encoder, f"down_blocks.{number}") for number in count()))
        layers = [layer for block in blocks for layer in fold_cosmos_block(block, dtype)]
        self.down_blocks = nn.Sequential(*layers)
        self.mid_block = nn.Sequential(*fold_cosmos_block(weights_of_part(encoder, "mid_block"), dtype))
        self.norm_out = GroupNorm(weights_of_part(encoder, "norm_out.norm"))
        conv_out = append_map(join_convs(weights_of_part(encoder, "conv_out")), *sum_taps(weights, "quant_conv"))
        self.conv_out = flat_conv(*conv_out, dtype)

    def forward(self, image_N3YX: Tensor) -> Tensor:
        """Map RGB, in the compute dtype, to latents: [N, C, Y/8, X/8], or Y/16, X/16."""
        patches = F.pixel_unshuffle(image_N3YX, self.patch).contiguous(memory_format=torch.channels_last)
        x_NCYX = self.mid_block(self.down_blocks(self.conv_in(patches)))
        return self.conv_out(F.silu(self.norm_out(x_NCYX)))  # type: ignore[no-any-return]


def fold_cosmos_block(weights: Weights, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Yield residual blocks, some followed by attention, then the layer that halves the sides."""
    for number in count():
        if not (residual := weights_of_part(weights, f"resnets.{number}")):
            break
        yield CosmosResidualBlock(residual, dtype)
        if attention := weights_of_part(weights, f"attentions.{number}"):
            yield CosmosAttentionBlock(attention, dtype)
            yield OneFrameAttention(weights_of_part(weights, f"temp_attentions.{number}"), dtype)
    if downsampler := weights_of_part(weights, "downsamplers.0"):
        yield fold_downsampler(downsampler, dtype)


class GroupNorm(nn.Module):
    """Normalises all values of an image together."""

    gain_C: Tensor
    bias_C: Tensor

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.register_buffer("gain_C", weights["weight"].detach().clone())
        self.register_buffer("bias_C", weights["bias"].detach().clone())

    def forward(self, x_NCYX: Tensor) -> Tensor:
        gain_C, bias_C = self.gain_C.to(x_NCYX.dtype), self.bias_C.to(x_NCYX.dtype)
        return F.group_norm(x_NCYX, 1, gain_C, bias_C, eps=NORM_EPS)


class CosmosResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice; added to the input, or to a 1x1 convolution of it."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = (GroupNorm(weights_of_part(weights, f"{name}.norm")) for name in ("norm1", "norm2"))
        self.conv1, self.conv2 = (
            flat_conv(*join_convs(weights_of_part(weights, name)), dtype) for name in ("conv1", "conv2")
        )
        widens = "conv_shortcut.weight" in weights
        self.shortcut = point_conv(*sum_taps(weights, "conv_shortcut"), dtype) if widens else nn.Identity()

    def forward(self, x_NCYX: Tensor) -> Tensor:
        y_NCYX = self.conv1(F.silu(self.norm1(x_NCYX)))
        y_NCYX = self.conv2(F.silu(self.norm2(y_NCYX)))
        return y_NCYX + self.shortcut(x_NCYX)  # type: ignore[no-any-return]


class CosmosAttentionBlock(nn.Module):
    """Single-head self-attention over the cells of one image, added to its input."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = GroupNorm(weights_of_part(weights, "norm.norm"))
        matrices, biases = zip(*(sum_taps(weights, name) for name in ("to_q", "to_k", "to_v")), strict=True)
        self.to_qkv = point_conv(torch.cat(matrices), torch.cat(biases), dtype)
        self.to_out = point_conv(*sum_taps(weights, "to_out.0"), dtype)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        qkv_NYXC = self.to_qkv(self.norm(x_NCYX)).permute(0, 2, 3, 1)
        query_N1TC, key_N1TC, value_N1TC = qkv_NYXC.flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        y_N1TC = F.scaled_dot_product_attention(query_N1TC, key_N1TC, value_N1TC)
        y_NYXC = y_N1TC.reshape(*qkv_NYXC.shape[:3], -1)
        return self.to_out(y_NYXC.permute(0, 3, 1, 2)) + x_NCYX  # type: ignore[no-any-return]


class OneFrameAttention(nn.Module):
    """Attention over the one frame of a still image: it returns the value, for any query and key."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = GroupNorm(weights_of_part(weights, "norm.norm"))
        (value, value_bias), (out, out_bias) = (sum_taps(weights, name) for name in ("to_v", "to_out.0"))
        self.value = point_conv(out @ value, out @ value_bias + out_bias, dtype)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        return self.value(self.norm(x_NCYX)) + x_NCYX  # type: ignore[no-any-return]


Conv = tuple[Tensor, Tensor]
"""Kernel [O, I, Y, X] and bias [O] of a convolution, float64."""


def join_convs(weights: Weights, patch: Tensor | None = None) -> Conv:
    """Join a convolution over space, perhaps after the matrix `patch`, and the convolution over time after it."""
    kernel = weights["conv_s.weight"].double().squeeze(2)
    if patch is not None:
        kernel = torch.einsum("opyx,pi->oiyx", kernel, patch)
    return append_map((kernel, weights["conv_s.bias"].double()), *sum_taps(weights, "conv_t"))


def sum_taps(weights: Weights, name: str) -> Conv:
    """Sum the taps of a convolution over time, which all see the same frame: [O, I] and [O]."""
    return weights[f"{name}.weight"].double().sum((2, 3, 4)), weights[f"{name}.bias"].double()


def append_map(conv: Conv, matrix_OI: Tensor, bias_O: Tensor) -> Conv:
    """Multiply a linear map of a convolution's outputs into the convolution."""
    kernel, bias = conv
    return torch.einsum("om,miyx->oiyx", matrix_OI, kernel), matrix_OI @ bias + bias_O


def fold_downsampler(weights: Weights, dtype: torch.dtype) -> nn.Module:
    """Fold a halving of the sides, of time, or of both: its convolutions, the averages beside them, the 1x1 after."""
    outputs = len(weights["conv3.bias"])
    same = torch.eye(outputs, dtype=torch.float64)
    conv: Conv = (same[:, :, None, None], torch.zeros(outputs, dtype=torch.float64))
    halves = "conv1.weight" in weights
    if halves:
        kernel = weights["conv1.weight"].double().squeeze(2).clone()
        kernel[:, :, :2, :2] += same[:, :, None, None] / 4
        conv = kernel, weights["conv1.bias"].double()
    if "conv2.weight" in weights:
        matrix, bias = sum_taps(weights, "conv2")
        conv = append_map(conv, matrix + same, bias)
    conv = append_map(conv, *sum_taps(weights, "conv3"))
    if not halves:
        return flat_conv(*conv, dtype)
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), flat_conv(*conv, dtype, stride=(2, 2)))


def point_conv(matrix_OI: Tensor, bias_O: Tensor, dtype: torch.dtype) -> nn.Module:
    return flat_conv(matrix_OI[:, :, None, None], bias_O, dtype)
