"""Measure images per second from JPEG bytes to fitted pixels, in one thread: Pillow alone, ours in full, ours reduced.

Times are processor time, which other load on the machine lengthens less than wall time.

Pillow alone opens, loads and resizes, and trusts the file; ours also checks the file, turns the image and follows the
recipe. `decode: reduced` changes pixels and latents; so does another filter, and both differences are shown.
Photographs are read before timing starts. With `--mosaic N`, N x N of them side by side, each 500 x 375, replace a
larger photograph.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import parser_with, program, rates, ratios, report, take_turns
from benchmarks.photographs import jpegs_of
from cache_store.format.array import ImageRecipe, Size
from precompute.encoders.encoder_config import ComputeDtype, EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig
from precompute.images.decode import decode_image
from precompute.images.fit import RESAMPLING, fit_image, placement_of

# Axes: N images, Y X pixels, 3 RGB.

PACKAGES = ("pillow", "numpy", "torch", "encode-once")


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    files = jpegs_of(options)
    size = {"height": options.height, "width": options.width}
    recipes = {
        "full": ImageConfig(**size).recipe,
        "reduced": ImageConfig(**size, decode="reduced").recipe,
        "bicubic": ImageConfig(**size, resample="bicubic").recipe,
    }
    works: dict[str, Callable[[], object]] = {"Pillow alone": partial(by_pillow, files, recipes["full"])}
    works |= {name: partial(by_build, files, recipes[name]) for name in ("full", "reduced")}
    seconds = take_turns(works, options.repeats, time.thread_time)
    speeds = {name: rates(len(files), each) for name, each in seconds.items()}
    pixels = {name: by_build(files, recipe) for name, recipe in recipes.items()}
    differences = {f"pixels, {name}": levels_apart(pixels["full"], pixels[name]) for name in ("reduced", "bicubic")}
    report(
        options,
        PACKAGES,
        "images_per_s",
        speeds,
        {f"{a} over {b}": ratios(speeds[a], speeds[b]) for a, b in (("full", "Pillow alone"), ("reduced", "full"))},
        images=len(files),
        reduced=sum(
            decode_image(data, recipes["reduced"], Size(1, options.height, options.width)).reduction > 1
            for data in files
        ),
        megabytes=round(sum(map(len, files)) / 1e6, 1),
        differences_from_full=differences | latents_apart(pixels, options),
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", "repeats", count=196)
    parser.add_argument("--model", help="a VAE's hub id or folder, to compare latents too")
    parser.add_argument("--latents", type=int, default=32, help="images whose latents are compared")
    return parser


def by_pillow(files: Sequence[bytes], recipe: ImageRecipe) -> np.ndarray:
    """Decode and resize as a plain script would, with the fit `squash`: uint8 [N, Y, X, 3]."""
    (size,), filter_ = recipe.rule.sizes, RESAMPLING[recipe.resample]
    images = map(Image.open, map(io.BytesIO, files))
    rgb = (image if image.mode == "RGB" else image.convert("RGB") for image in images)
    return np.stack([np.asarray(image.resize(size, filter_)) for image in rgb])


def by_build(files: Sequence[bytes], recipe: ImageRecipe) -> np.ndarray:
    """Decode and fit as a build does: uint8 [N, Y, X, 3]."""
    ((width, height),) = recipe.rule.sizes
    size = Size(1, height, width)
    images = (decode_image(data, recipe, size) for data in files)
    return np.stack([np.asarray(fit_image(each, recipe, placement_of(each.size, recipe, size))) for each in images])


def levels_apart(one_NYX3: np.ndarray, other_NYX3: np.ndarray) -> dict[str, float]:
    """Return mean, 99th percentile and maximum of the difference, in levels of 256."""
    apart = np.abs(one_NYX3.astype(np.int16) - other_NYX3)
    return {"mean": round(float(apart.mean()), 3), "p99": float(np.percentile(apart, 99)), "max": float(apart.max())}


def latents_apart(pixels: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the root mean square of the difference over that of the latents; empty without a model."""
    if options.model is None or options.latents < 1:
        return {}

    def encode(image_NYX3: np.ndarray, dtype: ComputeDtype) -> torch.Tensor:
        encoder = load_encoder(EncoderConfig(model=options.model, compute_dtype=dtype), ImageConfig().recipe)
        return torch.cat(
            [encoder.encode(torch.from_numpy(image[None, None])) for image in image_NYX3[: options.latents]]
        )

    full = encode(pixels["full"], "float32")
    others = {name: encode(pixels[name], "float32") for name in ("reduced", "bicubic")}
    others["in bfloat16"] = encode(pixels["full"], "bfloat16")
    apart = {name: ((each - full).norm() / full.norm()).item() for name, each in others.items()}
    return {f"latents, {name}": {"rms": round(each, 5)} for name, each in apart.items()}


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
