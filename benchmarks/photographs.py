"""JPEGs for benchmarks: photographs of a folder, or smooth noise; alone, or side by side in mosaics."""

import argparse
import io
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from cache_store.errors import ConfigError
from cache_store.messages import counted

TILE = (500, 375)
SUFFIXES = (".jpg", ".jpeg")


def jpegs_of(options: argparse.Namespace) -> list[bytes]:
    """Return the bytes of photographs, or of mosaics of them; ConfigError if there are too few."""
    side, needed = options.mosaic, options.mosaic**2
    if options.images is None:
        photographs = [jpeg(smooth_noise(number)) for number in range(options.count)]
    else:
        photographs = photographs_in(Path(options.images), options.count * needed)
    if len(photographs) < needed:
        found = f"{options.images or '--count'}: {counted(len(photographs), 'image')}"
        raise ConfigError(f"{found}, expected at least {needed}, for one image of --mosaic {side}")
    if side == 1:
        return photographs
    tiles = iter(photographs)
    return [mosaic([*islice(tiles, needed)], side) for _ in range(len(photographs) // needed)]


def photographs_in(folder: Path, most: int) -> list[bytes]:
    """Read the first JPEGs, by path, of a folder and its subfolders; ConfigError if there is none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    if not paths:
        raise ConfigError(f"--images {folder} holds no JPEG: no file with the suffix {' or '.join(SUFFIXES)}")
    return [path.read_bytes() for path in paths[:most]]


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


def write_images(folder: Path, options: argparse.Namespace, count: int) -> None:
    """Write `count` files; they repeat if there are fewer images."""
    folder.mkdir()
    files = jpegs_of(options)
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(files[number % len(files)])
