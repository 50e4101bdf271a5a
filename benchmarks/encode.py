"""Measure images per second of the folded encoder against diffusers' own encode: same weights, same images, one run.

Every side starts from uint8 pixels and ends with float32 latents. The peak is the faster of a square matrix product and
a 3x3 convolution of 384 channels on the same device in the same run, since a CPU's matrix product is not always its
fastest kernel.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import parser_with, program, rates, ratios, report, take_turns
from precompute.encode.device_feed import CudaRuntime
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import ComputeDtype, EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig

# Axes: N images, Y X pixels, 3 RGB.

DTYPES: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
DUELS = (
    ("folded float32", "diffusers float32"),
    ("folded bfloat16", "diffusers bfloat16"),
    ("compiled bfloat16", "diffusers bfloat16"),
    ("compiled bfloat16", "diffusers-compiled bfloat16"),
    ("replayed bfloat16", "diffusers bfloat16"),
    ("replayed bfloat16", "diffusers-compiled bfloat16"),
    ("folded bfloat16", "diffusers float32"),
)
"""Pairs of one dtype first, then our best against the dtype that diffusers loads; only pairs that ran are reported."""
PACKAGES = ("torch", "diffusers", "encode-once")
PEAK_SIZE = {"cpu": (1024, 28), "cuda": (8192, 512)}
"""Side of the matrices, and side of the convolution's input, that show a device's peak."""
PEAK_CHANNELS = 384


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        encoders = load_rivals(options.model or random_model(folder, options.base_dim), options.device)
    folded = encoders["folded float32"]
    images_NTYX3 = random_images(options, folded.device)
    encodings: dict[str, Callable[[], Tensor]] = {
        name: partial(encoder.encode, images_NTYX3) for name, encoder in encoders.items()
    }
    if folded.device.type == "cuda":
        encodings["replayed bfloat16"] = replayed(encoders["compiled bfloat16"], images_NTYX3)
    peaks, peak_flop = peak_works(folded.device)
    works = {name: partial(run_to_end, work, folded.device) for name, work in (encodings | peaks).items()}
    seconds = take_turns(works, options.repeats)
    speeds = {name: rates(options.batch_size, seconds[name]) for name in encodings}
    # Only the folded network's operations count as useful, whichever path computes them.
    with FlopCounterMode(display=False) as counter:
        folded.encode(images_NTYX3[:1])
    gflop = counter.get_total_flops() / 1e9
    peak: dict[str, float] = {
        dtype: max(flop / 1e9 / min(seconds[name]) for name, flop in peak_flop.items() if name.endswith(dtype))
        for dtype in DTYPES
    }
    report(
        options,
        PACKAGES,
        "images_per_s",
        speeds,
        {f"{ours} over {theirs}": ratios(speeds[ours], speeds[theirs]) for ours, theirs in DUELS if ours in speeds},
        device=str(folded.device),
        threads=torch.get_num_threads(),
        gflop_per_image=round(gflop, 3),
        peak_gflop_per_s={dtype: round(each, 1) for dtype, each in peak.items()},
        peak_share={name: round(median(each) * gflop / peak[name.split()[1]], 4) for name, each in speeds.items()},
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    return parser_with(__doc__, "height", "width", "model", "base_dim", "device", "repeats", batch_size=4)


def random_model(folder: str, base_dim: int) -> str:
    torch.manual_seed(0)
    AutoencoderKLWan(base_dim=base_dim, decoder_base_dim=8).save_pretrained(folder)
    return folder


def load_rivals(model: str, device: str) -> dict[str, Encoder]:
    """Load diffusers' encoder and the folded one, each in both dtypes; on a GPU, also compiled ones in bfloat16."""

    def load(dtype: ComputeDtype, fold: bool, compiled: bool = False) -> Any:
        config = EncoderConfig(model=model, compute_dtype=dtype, fold=fold, compile=compiled, device=device)
        return load_encoder(config, ImageConfig().recipe)

    rivals = {}
    for dtype in DTYPES:
        rivals[f"diffusers {dtype}"] = load(dtype, fold=False)
        rivals[f"folded {dtype}"] = load(dtype, fold=True)
    if rivals["folded float32"].device.type == "cuda":
        rivals["compiled bfloat16"] = load("bfloat16", fold=True, compiled=True)
        stock = rivals["diffusers-compiled bfloat16"] = load("bfloat16", fold=False)
        stock._vae = replace(stock._vae, network=torch.compile(stock._vae.network))  # as a whole, as its users do
    return rivals


def replayed(encoder: Encoder, images_NTYX3: Tensor) -> Callable[[], Tensor]:
    """Capture the encoder's work on these images as a CUDA graph; return what replays it."""
    runtime = CudaRuntime(encoder.device)
    replay, result = runtime.capture(lambda: encoder.encode(images_NTYX3), runtime.stream())

    def run() -> Tensor:
        replay()
        return result

    return run


def random_images(options: argparse.Namespace, device: torch.device) -> Tensor:
    shape = (options.batch_size, 1, options.height, options.width, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)


def peak_works(device: torch.device) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """Return the kernels that show the device's peak in each dtype, and the floating-point operations of each."""
    side, size = PEAK_SIZE[device.type]
    works, flop = dict[str, Callable[[], Tensor]](), dict[str, int]()
    for dtype in DTYPES:
        like = {"device": device, "dtype": getattr(torch, dtype)}
        matrix = torch.randn(side, side, **like)
        image = torch.randn(1, PEAK_CHANNELS, size, size, **like).to(memory_format=torch.channels_last)
        kernel = torch.randn(PEAK_CHANNELS, PEAK_CHANNELS, 3, 3, **like).to(memory_format=torch.channels_last)
        works[f"matmul {dtype}"] = partial(torch.matmul, matrix, matrix)
        works[f"convolution {dtype}"] = partial(F.conv2d, image, kernel, padding=1)
        flop[f"matmul {dtype}"] = 2 * side**3
        flop[f"convolution {dtype}"] = 2 * 9 * PEAK_CHANNELS**2 * size**2
    return works, flop


@torch.inference_mode()
def run_to_end(work: Callable[[], Tensor], device: torch.device) -> None:
    """Do the work, and wait until a GPU has finished it."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
