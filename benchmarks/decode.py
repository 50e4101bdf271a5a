"""Measure images per second from JPEG bytes to fitted pixels, in one thread: Pillow alone, ours in full, ours reduced.

Times are processor time, which other load on the machine lengthens less than wall time.

Pillow alone opens, loads and resizes, and trusts the file; ours first counts the file's parts, then turns the image and
follows the recipe. The difference between reduced and full pixels, and between their latents, is shown beside that of
another filter, since both are choices of a recipe. Photographs are read before timing starts. With `--mosaic N`, N x N
of them side by side, each 500 x 375, replace a larger photograph.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.errors import ConfigError
from cache_store.format.array import ImageRecipe
from cache_store.program.running import run_program
from cache_store.refusal import counted
from precompute.images.decode import ImageConfig, decode_image
from precompute.images.fit import RESAMPLING, fit_image, to_pixels
from precompute.sources.archives.image_store import open_image_store
from precompute.sources.folder import is_image

# Axes: N images, Y X pixels, 3 RGB.

TILE = (500, 375)
DUELS = (("full", "Pillow alone"), ("reduced", "full"))
PACKAGES = ("pillow", "numpy", "torch", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.decode", run, argv)


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
    seconds = interleaved_seconds(works, options.repeats, time.thread_time)
    speeds = {name: rates(len(files), each) for name, each in seconds.items()}
    ratios = {f"{ours} over {theirs}": speedups(seconds[theirs], seconds[ours]) for ours, theirs in DUELS}
    pixels = {name: by_build(files, recipe) for name, recipe in recipes.items()}
    differences = {f"pixels, {name}": levels_apart(pixels["full"], pixels[name]) for name in ("reduced", "bicubic")}
    differences |= latents_apart(pixels, options)
    is_reduced = [decode_image(data, recipes["reduced"]).reduction > 1 for data in files]
    for name, each in (speeds | ratios).items():
        print(f"{name:<24}{spread(each)}")
    for name, figures in differences.items():
        print(f"{name:<24}{figures}")
    print_record(
        "decode",
        PACKAGES,
        settings=vars(options),
        images=len(files),
        reduced=sum(is_reduced),
        megabytes=round(sum(map(len, files)) / 1e6, 1),
        images_per_s={name: spread(each) for name, each in speeds.items()},
        ratios={name: spread(each) for name, each in ratios.items()},
        differences_from_full=differences,
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", "repeats", count=196)
    parser.add_argument("--model", help="a VAE's hub id or folder, to compare latents too")
    parser.add_argument("--latents", type=int, default=32, help="images whose latents are compared")
    return parser


def jpegs_of(options: argparse.Namespace) -> list[bytes]:
    """Return the bytes of photographs, or of mosaics of them; ConfigError if there are too few."""
    side = options.mosaic
    if options.images is None:
        photographs = [jpeg(smooth_noise(number)) for number in range(options.count)]
    else:
        photographs = photographs_in(Path(options.images), options.count * side**2)
    if len(photographs) < side**2:
        found = f"{options.images or '--count'}: {counted(len(photographs), 'image')}"
        raise ConfigError(f"{found}, expected at least {side**2}, for one image of --mosaic {side}")
    if side == 1:
        return photographs
    tiles = iter(photographs)
    groups = (list(islice(tiles, side**2)) for _ in range(len(photographs) // side**2))
    return [mosaic(group, side) for group in groups]


def photographs_in(path: Path, most: int) -> list[bytes]:
    """Read the first images, by name, of a folder, zip or tar; ConfigError if there is none."""
    images = open_image_store(path)
    names = [name for name in images.listing().names if is_image(name)]
    if not names:
        raise ConfigError(f"--images {path} holds no image: no file with a suffix such as .jpg or .png")
    return [images.read(name) for name in names[:most]]


def smooth_noise(number: int) -> Image.Image:
    cells = np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)
    return Image.fromarray(cells).resize(TILE, Image.Resampling.BICUBIC)


def mosaic(photographs: Sequence[bytes], side: int) -> bytes:
    whole = Image.new("RGB", (TILE[0] * side, TILE[1] * side))
    for place, data in enumerate(photographs):
        tile = Image.open(io.BytesIO(data)).convert("RGB").resize(TILE)
        whole.paste(tile, (place % side * TILE[0], place // side * TILE[1]))
    return jpeg(whole)


def jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def by_pillow(files: Sequence[bytes], recipe: ImageRecipe) -> np.ndarray:
    """Decode and resize as a plain script would, with the fit `squash`: uint8 [N, Y, X, 3]."""
    size, filter_ = (recipe.width, recipe.height), RESAMPLING[recipe.resample]
    images = map(Image.open, map(io.BytesIO, files))
    rgb = (image if image.mode == "RGB" else image.convert("RGB") for image in images)
    return np.stack([np.asarray(image.resize(size, filter_)) for image in rgb])


def by_build(files: Sequence[bytes], recipe: ImageRecipe) -> np.ndarray:
    """Decode and fit as a build does: uint8 [N, Y, X, 3]."""
    return np.stack([to_pixels(fit_image(decode_image(data, recipe), recipe)) for data in files])


def levels_apart(one_NYX3: np.ndarray, other_NYX3: np.ndarray) -> dict[str, float]:
    """Return mean, 99th percentile and maximum of the difference, in levels of 256."""
    apart = np.abs(one_NYX3.astype(np.int16) - other_NYX3)
    return {"mean": round(float(apart.mean()), 3), "p99": float(np.percentile(apart, 99)), "max": float(apart.max())}


def latents_apart(pixels: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the root mean square of the difference over that of the latents; empty without a model."""
    if options.model is None or options.latents < 1:
        return {}
    import torch  # takes seconds to import

    from precompute.encoders.config import ComputeDtype, EncoderConfig
    from precompute.encoders.registry import load_encoder

    def encode(image_NYX3: np.ndarray, dtype: ComputeDtype) -> torch.Tensor:
        encoder = load_encoder(EncoderConfig(model=options.model, compute_dtype=dtype), "signed")
        return torch.cat([encoder.encode(torch.from_numpy(image[None])) for image in image_NYX3[: options.latents]])

    full = encode(pixels["full"], "float32")
    others = {name: encode(pixels[name], "float32") for name in ("reduced", "bicubic")}
    others["in bfloat16"] = encode(pixels["full"], "bfloat16")
    return {
        f"latents, {name}": {"rms": round(((each - full).norm() / full.norm()).item(), 5)}
        for name, each in others.items()
    }


if __name__ == "__main__":
    sys.exit(main())
