"""Read the encode path of a Wan-like VAE from its files: its config, and every weight by diffusers' name.

Diffusers is not imported, because that takes several seconds per process. The decoder, more than half of a checkpoint,
is not read.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from precompute.encoders.model_files import ModelFiles, refuse_incomplete
from precompute.encoders.vaes.kind import VaeKind
from precompute.encoders.weights import DIFFUSERS_FILES, read_weights


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


def read_encode_path(files: ModelFiles, kind: VaeKind, config: WanConfig) -> dict[str, Tensor]:
    """Read every weight of the encode path as float32; raise ModelError if one is missing, unknown or misshapen."""
    held = dict(
        read_weights(files, DIFFUSERS_FILES, lambda name: name if name.startswith(kind.encode_weights) else None)
    )
    shapes = dict(encode_path(config, is_flat=files.class_name == "AutoencoderKLQwenImage21"))
    report = {
        "missing_keys": shapes.keys() - held.keys(),
        "unexpected_keys": held.keys() - shapes.keys(),
        "mismatched_keys": [name for name in shapes.keys() & held.keys() if held[name].shape != shapes[name]],
    }
    refuse_incomplete(files, report, "encode path", kind.encode_weights)
    return {name: weight.to(torch.float32) for name, weight in held.items()}


Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of weights, in the layout of diffusers' `WanEncoder3d`."""


def encode_path(config: WanConfig, is_flat: bool = False) -> Shapes:
    """Yield the shape of every weight of an encode path; if flat, its kernels have no axis of time."""
    for name, shape in causal_encode_path(config):
        yield name, (*shape[:2], *shape[3:]) if is_flat and len(shape) == 5 else shape


def causal_encode_path(config: WanConfig) -> Shapes:
    widths, moments = [config.base_dim * multiple for multiple in (1, *config.dim_mult)], 2 * config.z_dim
    last = widths[-1]
    blocks = residual_down_blocks if config.is_residual else down_blocks
    yield from conv("encoder.conv_in", config.in_channels, widths[0], 3, 3, 3)
    for number, block in enumerate(blocks(config, widths)):
        yield from block(f"encoder.down_blocks.{number}")
    yield from residual_block("encoder.mid_block.resnets.0", last, last)
    yield from attention_block("encoder.mid_block.attentions.0", last)
    yield from residual_block("encoder.mid_block.resnets.1", last, last)
    yield "encoder.norm_out.gamma", (last, 1, 1, 1)
    yield from conv("encoder.conv_out", last, moments, 3, 3, 3)
    yield from conv("quant_conv", moments, moments, 1, 1, 1)


def down_blocks(config: WanConfig, widths: list[int]) -> Iterator[partial[Shapes]]:
    """Yield each level's residual blocks, some followed by attention, then the block that halves height and width."""
    for level, (inputs, outputs) in enumerate(pairwise(widths)):
        for block in range(config.num_res_blocks):
            yield partial(residual_block, inputs=outputs if block else inputs, outputs=outputs)
            if 0.5**level in config.attn_scales:
                yield partial(attention_block, channels=outputs)
        if level < len(config.dim_mult) - 1:
            yield partial(resample_block, channels=outputs, in_time=config.temperal_downsample[level])


def residual_down_blocks(config: WanConfig, widths: list[int]) -> Iterator[partial[Shapes]]:
    """Yield one block per level; its shortcut has no weights."""
    for level, (inputs, outputs) in enumerate(pairwise(widths)):
        halves = level < len(config.dim_mult) - 1
        in_time = halves and config.temperal_downsample[level]
        yield partial(
            residual_down_block,
            inputs=inputs,
            outputs=outputs,
            blocks=config.num_res_blocks,
            halves=halves,
            in_time=in_time,
        )


def residual_down_block(name: str, inputs: int, outputs: int, blocks: int, halves: bool, in_time: bool) -> Shapes:
    for block in range(blocks):
        yield from residual_block(f"{name}.resnets.{block}", outputs if block else inputs, outputs)
    if halves:
        yield from resample_block(f"{name}.downsampler", outputs, in_time)


def residual_block(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.norm1.gamma", (inputs, 1, 1, 1)
    yield from conv(f"{name}.conv1", inputs, outputs, 3, 3, 3)
    yield f"{name}.norm2.gamma", (outputs, 1, 1, 1)
    yield from conv(f"{name}.conv2", outputs, outputs, 3, 3, 3)
    if inputs != outputs:
        yield from conv(f"{name}.conv_shortcut", inputs, outputs, 1, 1, 1)


def attention_block(name: str, channels: int) -> Shapes:
    yield f"{name}.norm.gamma", (channels, 1, 1)
    yield from conv(f"{name}.to_qkv", channels, 3 * channels, 1, 1)
    yield from conv(f"{name}.proj", channels, channels, 1, 1)


def resample_block(name: str, channels: int, in_time: bool) -> Shapes:
    yield from conv(f"{name}.resample.1", channels, channels, 3, 3)
    if in_time:
        yield from conv(f"{name}.time_conv", channels, channels, 3, 1, 1)


def conv(name: str, inputs: int, outputs: int, *kernel: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, *kernel)
    yield f"{name}.bias", (outputs,)
