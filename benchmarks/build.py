"""Measure images per second of a whole `precompute build` against its parts alone: decoding and encoding.

On a GPU a build should reach the slower of decoding and encoding; on a CPU the two share the cores, so the build is
compared with doing both in turn. A build's rate is measured from the moment its encoder is loaded; the rest of its time
is reported separately. Memory is the peak of a separate process, for `--count` images and for ten times as many.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.decode import jpegs_of
from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program, usable_cores

if TYPE_CHECKING:
    from benchmarks.build_parts import Parts

PACKAGES = ("pillow", "torch", "diffusers", "numpy", "encode-once")
MORE = 10
"""Factor of images that shows whether memory grows with them."""

PEAK = """
import sys
from precompute.cli import main
code = main(sys.argv[1:])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
sys.exit(code)
"""
"""Program that prints its peak memory in KiB; a child's `ru_maxrss` would start with its parent's."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.build", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    # These imports and torch take seconds; `--help` and wrong usage stay quick.
    from benchmarks.build_parts import Parts, save_vae
    from precompute.config import BuildConfig

    with tempfile.TemporaryDirectory(prefix="build-", dir=options.folder) as name:
        folder = Path(name)
        save_vae(folder / "model", options.vae)
        write_images(folder / "images", options, options.count)
        config = parse_config(BuildConfig, arguments(folder, "images", options)[1:])
        measured = rates_of_parts(Parts(config), options)
        write_images(folder / "more", options, options.count * MORE)
        counts = {"images": options.count, "more": options.count * MORE}
        measured["peak_mib"] = {str(count): peak_mib(folder, each, options) for each, count in counts.items()}
    for part, figures in measured.items():
        print(f"{part:<34}{figures}")
    print_record("build", PACKAGES, settings=vars(options) | {"decode_threads": usable_cores()}, **measured)
    return 0


def option_parser(description: str | None = __doc__, *more: str) -> argparse.ArgumentParser:
    names = ("vae", "images", "mosaic", "height", "width", "repeats", "folder")
    parser = parser_with(description, *names, *more, count=196, batch_size=8)
    parser.add_argument("--compute-dtype", default="bfloat16")
    return parser


def write_images(folder: Path, options: argparse.Namespace, count: int) -> None:
    folder.mkdir()
    files = jpegs_of(options)
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(files[number % len(files)])


def arguments(folder: Path, images: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments with which `precompute` builds the cache `{images}.cache` from the folder `{images}`."""
    values = {
        "cache": folder / f"{images}.cache",
        "source.kind": "folder",
        "source.path": folder / images,
        "image.height": options.height,
        "image.width": options.width,
        "encoder.model": folder / "model",
        "encoder.compute_dtype": options.compute_dtype,
        "encoder.batch_size": options.batch_size,
        "store.samples_per_shard": options.batch_size * max(1, options.count // options.batch_size // 3),
    }
    return ["build", *(each for name, value in values.items() for each in (f"--{name}", str(value)))]


def rates_of_parts(parts: "Parts", options: argparse.Namespace) -> dict[str, object]:
    works: dict[str, Callable[[], object]] = {
        "build": parts.build,
        "decode only": partial(parts.decode, usable_cores()),
        "encode only": parts.encode,
    }
    seconds = interleaved_seconds(works, options.repeats)
    encoded = parts.encoded[-options.repeats :]
    encoding = [options.count / each.images_per_s for each in encoded]
    both = list(zip(seconds["decode only"], seconds["encode only"], strict=True))
    return {
        "images_per_s": {
            name: spread(rates(options.count, each)) for name, each in (seconds | {"build": encoding}).items()
        },
        "build_over_the_slower": spread(speedups([max(pair) for pair in both], encoding)),
        "build_over_both_in_turn": spread(speedups([sum(pair) for pair in both], encoding)),
        "before_and_after_encoding_s": spread(
            [whole - part for whole, part in zip(seconds["build"], encoding, strict=True)]
        ),
        "encoder_works": spread([each.working_share for each in encoded]),
    }


def peak_mib(folder: Path, images: str, options: argparse.Namespace) -> float:
    shutil.rmtree(folder / f"{images}.cache", ignore_errors=True)
    command = [sys.executable, "-c", PEAK, *arguments(folder, images, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(int(done.stdout.splitlines()[-1]) / 2**10, 1)


if __name__ == "__main__":
    sys.exit(main())
