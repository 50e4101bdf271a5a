"""The work that `benchmarks.encode` times: the encoders, and kernels that show the device's peak."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from precompute.encode.device_feed import CudaRuntime
from precompute.encoders.config import ComputeDtype, EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder

# Axes: N images, Y X pixels.

PEAK_SIZE = {"cpu": (2048, 56), "cuda": (8192, 512)}
"""Side of the matrices, and side of the convolution's input, that show a device's peak."""
PEAK_CHANNELS = 384


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the model that was asked for, or a folder with a random one, deleted after the block."""
    if options.model is not None:
        yield options.model
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoencoderKLWan(base_dim=options.base_dim, decoder_base_dim=8).save_pretrained(folder)
        yield folder


def load_rivals(model: str, device: str) -> dict[str, Encoder]:
    """Load diffusers' encoder and the folded one, each in both dtypes; on a GPU, also the compiled one in bfloat16."""

    def load(dtype: ComputeDtype, fold: bool, compiled: bool = False) -> Encoder:
        config = EncoderConfig(model=model, compute_dtype=dtype, fold=fold, compile=compiled, device=device)
        return load_encoder(config, "signed")

    rivals = {}
    for dtype in get_args(ComputeDtype):
        rivals[f"diffusers {dtype}"] = load(dtype, fold=False)
        rivals[f"folded {dtype}"] = load(dtype, fold=True)
    if rivals["folded float32"].device.type == "cuda":
        rivals["compiled bfloat16"] = load("bfloat16", fold=True, compiled=True)
        rivals["diffusers-compiled bfloat16"] = compiled_stock(load("bfloat16", fold=False))
    return rivals


def compiled_stock(encoder: Any) -> Encoder:
    """Compile diffusers' own path as a whole, as its users do."""
    encoder._vae = replace(encoder._vae, network=torch.compile(encoder._vae.network))
    compiled: Encoder = encoder
    return compiled


def replayed(encoder: Encoder, images_NYX3: Tensor) -> Callable[[], Tensor]:
    """Capture the encoder's work on these images as a CUDA graph; return what replays it."""
    runtime = CudaRuntime(encoder.device)
    replay, result = runtime.capture(lambda: encoder.encode(images_NYX3), runtime.stream())

    def run() -> Tensor:
        replay()
        return result

    return run


def random_images(options: argparse.Namespace, device: torch.device) -> Tensor:
    shape = (options.batch_size, options.height, options.width, 3)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def peak_works(device: torch.device) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Return the kernels that show the device's peak in each dtype, and the floating-point operations of each."""
    side, size = PEAK_SIZE[device.type]
    works, flop = dict[str, Callable[[], None]](), dict[str, int]()
    for dtype in get_args(ComputeDtype):
        like = {"device": device, "dtype": getattr(torch, dtype)}
        matrix = torch.randn(side, side, **like)
        image = torch.randn(1, PEAK_CHANNELS, size, size, **like).to(memory_format=torch.channels_last)
        kernel = torch.randn(PEAK_CHANNELS, PEAK_CHANNELS, 3, 3, **like).to(memory_format=torch.channels_last)
        works[f"matmul {dtype}"] = partial(run_to_end, partial(torch.matmul, matrix, matrix), device)
        works[f"convolution {dtype}"] = partial(run_to_end, partial(F.conv2d, image, kernel, padding=1), device)
        flop[f"matmul {dtype}"] = 2 * side**3
        flop[f"convolution {dtype}"] = 2 * 9 * PEAK_CHANNELS**2 * size**2
    return works, flop


@torch.inference_mode()
def run_to_end(work: Callable[[], Tensor], device: torch.device) -> None:
    """Do the work, and wait until a GPU has finished it."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flop_of_one_image(encoder: Encoder, images_NYX3: Tensor) -> int:
    """Count floating-point operations of convolutions and matrix products, two for each multiply and add."""
    with FlopCounterMode(display=False) as counter:
        encoder.encode(images_NYX3[:1])
    return int(counter.get_total_flops())
