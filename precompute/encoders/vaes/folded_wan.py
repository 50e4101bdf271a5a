"""The encoder of Wan-like VAEs for still images: the 3-D network folded, exactly, into a 2-D one.

Wan's causal convolutions left-pad time with zeros, so on a single frame only the last temporal tap sees anything but
zeros: a `Conv3d` is the `Conv2d` of `W[:, :, -1]`, temporal resampling is skipped on the first frame, and
attention is per frame. In the residual form, shortcuts average frames too; all but the last are zeros. The 2-D network
runs channels-last.

Measured and left out, each under 3 %: oneDNN-packed weights, the residual sum fused into the convolution, an
asymmetric padding in place of pad and convolve.
"""

# Axes: N images, C channels, Y X cells of the stage at hand, P pixels of a block, T tokens (Y·X) of attention.

from collections.abc import Callable
from itertools import count, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache_store.format.array import Normalization
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.folding import Weights, flat_conv, prepare_network, weights_of_part
from precompute.encoders.vaes.kind import VaeKind, refuse_other_lengths
from precompute.encoders.vaes.vae import FrozenVae, add_alpha
from precompute.encoders.vaes.wan_files import read_encode_path, wan_config
from precompute.encoders.weights import model_errors, weights_sha256

SMALLEST_LENGTH = 1e-12
"""Floor of a channel vector's length, as in `F.normalize`."""


def folded_wan(files: ModelFiles, kind: VaeKind, config: EncoderConfig) -> FrozenVae:
    """Load the frozen encode path of the model in `files`, and fold it."""
    with model_errors(files):
        held = wan_config(files)
        normalization = Normalization(latents_mean=held.latents_mean, latents_std=held.latents_std)
        refuse_other_lengths(files, kind, normalization, held.z_dim)
        weights = read_encode_path(files, kind, held)
        folded = FoldedWanEncoder(weights, config.torch_dtype, held.patch_size or 1)
    return FrozenVae(
        network=prepare_network(folded, config),
        class_name=files.class_name,
        weights_sha256=weights_sha256(files.class_name, held.values, kind.encode_config, weights.items()),
        kind=kind,
        config=held.values,
        normalization=normalization,
        is_folded=True,
    )


class FoldedWanEncoder(nn.Module):
    """Encoder and `quant_conv` of an `AutoencoderKLWan` for one frame, made from weights by diffusers' names.

    It copies the weights. `patch` is the side of the patches that an image is cut into first.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, patch: int = 1) -> None:
        super().__init__()
        self.patch = patch
        encoder = weights_of_part(weights, "encoder")
        down_blocks = takewhile(bool, (weights_of_part(encoder, f"down_blocks.{number}") for number in count()))
        self.conv_in = fold_conv(order_patch_inputs(encoder, patch), "conv_in", dtype)
        self.pixel_channels = encoder["conv_in.weight"].shape[1] // patch**2
        self.down_blocks = nn.Sequential(*(fold_wan_block(block, dtype) for block in down_blocks))
        middle = (weights_of_part(encoder, f"mid_block.{name}") for name in ("resnets.0", "attentions.0", "resnets.1"))
        self.mid_block = nn.Sequential(*(fold_wan_block(block, dtype) for block in middle))
        self.norm_out = RMSNorm(encoder["norm_out.gamma"])
        self.conv_out = fold_conv(encoder, "conv_out", dtype)
        self.quant_conv = fold_conv(weights, "quant_conv", dtype)

    def forward(self, image_N3YX: Tensor) -> Tensor:
        """Map RGB, in the compute dtype, to the posterior's mean and log-variance: [N, 2C, Y/8, X/8], or Y/16, X/16."""
        if self.pixel_channels > 3:
            image_N3YX = add_alpha(image_N3YX)
        if self.patch > 1:
            image_N3YX = F.pixel_unshuffle(image_N3YX, self.patch)
        x_NCYX = self.conv_in(image_N3YX.contiguous(memory_format=torch.channels_last))
        x_NCYX = self.mid_block(self.down_blocks(x_NCYX))
        return self.quant_conv(self.conv_out(self.norm_out(x_NCYX, silu=True)))  # type: ignore[no-any-return]


def order_patch_inputs(encoder: Weights, patch: int) -> Weights:
    """Put the first convolution's inputs into the order of `pixel_unshuffle`; diffusers orders patches by columns."""
    weight = encoder["conv_in.weight"]
    columns = weight.reshape(len(weight), -1, patch, patch, *weight.shape[2:])
    return {**encoder, "conv_in.weight": columns.transpose(2, 3).reshape(weight.shape)}


class RMSNorm(nn.Module):
    """Scales each pixel's channel vector to RMS 1, times a gain; then SiLU if asked."""

    gain_C: Tensor

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain_C", gain.detach().float().flatten().clone())

    def forward(self, x_NCYX: Tensor, silu: bool) -> Tensor:
        x_NYXC = x_NCYX.permute(0, 2, 3, 1).contiguous()  # no copy after a channels-last layer
        gain_C = self.gain_C.to(x_NYXC.dtype)
        y_NYXC = F.rms_norm(x_NYXC, gain_C.shape, gain_C, eps=SMALLEST_LENGTH**2)
        return (F.silu(y_NYXC, inplace=True) if silu else y_NYXC).permute(0, 3, 1, 2)


class WanResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice; added to the input, or to a 1x1 convolution of it."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(weights["norm1.gamma"])
        self.conv1 = fold_conv(weights, "conv1", dtype)
        self.norm2 = RMSNorm(weights["norm2.gamma"])
        self.conv2 = fold_conv(weights, "conv2", dtype)
        widens = "conv_shortcut.weight" in weights
        self.shortcut = fold_conv(weights, "conv_shortcut", dtype) if widens else nn.Identity()

    def forward(self, x_NCYX: Tensor) -> Tensor:
        y_NCYX = self.conv1(self.norm1(x_NCYX, silu=True))
        y_NCYX = self.conv2(self.norm2(y_NCYX, silu=True))
        return y_NCYX.add_(self.shortcut(x_NCYX))  # type: ignore[no-any-return]


class WanAttentionBlock(nn.Module):
    """Single-head self-attention over the cells of one image, added to its input."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(weights["norm.gamma"])
        self.to_qkv = flat_conv(weights["to_qkv.weight"], weights["to_qkv.bias"], dtype)
        self.proj = flat_conv(weights["proj.weight"], weights["proj.bias"], dtype)

    def forward(self, x_NCYX: Tensor) -> Tensor:
        qkv_NYXC = self.to_qkv(self.norm(x_NCYX, silu=False)).permute(0, 2, 3, 1)
        query_N1TC, key_N1TC, value_N1TC = qkv_NYXC.flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        y_N1TC = F.scaled_dot_product_attention(query_N1TC, key_N1TC, value_N1TC)
        y_NYXC = y_N1TC.reshape(*qkv_NYXC.shape[:3], -1)
        return self.proj(y_NYXC.permute(0, 3, 1, 2)).add_(x_NCYX)  # type: ignore[no-any-return]


def fold_resample(weights: Weights, dtype: torch.dtype) -> nn.Module:
    """Make the layer that halves height and width, without `time_conv`, which needs a second frame."""
    conv = flat_conv(weights["resample.1.weight"], weights["resample.1.bias"], dtype, stride=(2, 2))
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv)


class ResidualDownBlock(nn.Module):
    """Residual blocks that may end in a halving, added to an average of the inputs of each output cell."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        blocks = takewhile(bool, (weights_of_part(weights, f"resnets.{number}") for number in count()))
        self.resnets = nn.Sequential(*(WanResidualBlock(block, dtype) for block in blocks))
        downsampler = weights_of_part(weights, "downsampler")
        self.downsampler = fold_resample(downsampler, dtype) if downsampler else nn.Identity()
        self.side = 2 if downsampler else 1
        self.frames = 2 if "time_conv.weight" in downsampler else 1
        self.outputs = len(weights["resnets.0.conv1.weight"])

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


FOLDED: dict[str, Callable[[Weights, torch.dtype], nn.Module]] = {
    "conv1.weight": WanResidualBlock,
    "to_qkv.weight": WanAttentionBlock,
    "resample.1.weight": fold_resample,
    "resnets.0.conv1.weight": ResidualDownBlock,
}
"""Makers of blocks, by the name of a weight that only such a block has."""


def fold_wan_block(weights: Weights, dtype: torch.dtype) -> nn.Module:
    return next(fold for name, fold in FOLDED.items() if name in weights)(weights, dtype)


def fold_conv(weights: Weights, name: str, dtype: torch.dtype) -> nn.Module:
    """Fold a causal convolution for a first frame: a kernel of k frames sees k-1 frames of zeros before it.

    Qwen-Image 2.1 has kernels without time.
    """
    weight = weights[f"{name}.weight"]
    return flat_conv(weight[:, :, -1] if weight.dim() == 5 else weight, weights[f"{name}.bias"], dtype)
