"""Measure bytes per second of verification, full and deep, with one thread and two, against `sha256sum` of the files.

Files are read from the page cache, where they were just written. The second baseline is OpenSSL's SHA-256 from Python,
in as many threads, since coreutils' `sha256sum` may lack the processor's SHA instructions: no verification that hashes
every byte can be faster. For the compressed codec, bytes on disk are counted, not decoded bytes.
"""

import argparse
import gc
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.format.array import CodecName
from cache_store.format.schema import StoreFormat
from cache_store.program.running import run_program
from cache_store.verify.verify import Level, verify
from tests.make_cache import make_cache

# Axes: N samples, C channels, H W latent cells.

SHAPE = (16, 28, 28)
FORMS: tuple[tuple[StoreFormat, CodecName], ...] = (("zarr", "none"), ("zarr", "zstd"), ("webdataset", "none"))
JOBS = (1, 2)
LEVELS: tuple[Level, ...] = ("full", "deep")
BASELINES = ("sha256sum", *(f"hashlib, {jobs} jobs" for jobs in JOBS))
PACKAGES = ("numpy", "pyarrow", "awscrt", "numcodecs", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.verify", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=options.folder) as folder:
        caches = make_caches(Path(folder), options)
        works = {name: work for form, path in caches.items() for name, work in works_of(form, path).items()}
        gc.freeze()  # as the command does
        seconds = interleaved_seconds(works, options.repeats)
        sizes = {form: sum(path.stat().st_size for path in files_of(cache)) for form, cache in caches.items()}
        quick = quick_seconds(Path(folder) / "many", options)
    speeds = {name: rates(sizes[name.partition(":")[0]] / 1e9, taken) for name, taken in seconds.items()}
    ratios = ratios_of(seconds)
    print_table(speeds, ratios, quick, options.quick_shards)
    print_record(
        "verify",
        PACKAGES,
        options=vars(options),
        bytes=sizes,
        gb_per_s={name: spread(each, 5) for name, each in speeds.items()},
        ratios={name: spread(each, 2) for name, each in ratios.items()},
        quick_s_per_1000_shards=spread([each * 1_000 / options.quick_shards for each in quick]),
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "samples_per_shard", "repeats", "folder", samples=40_960)
    parser.add_argument("--quick-shards", type=int, default=2_000, help="tiny shards in the cache for level quick")
    return parser


def make_caches(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Write a cache of the same noise in every form; return their paths by name."""
    latent_NCHW = np.random.default_rng(0).standard_normal((options.samples, *SHAPE), np.float32)
    caches = {}
    for store_format, codec in FORMS:
        name = f"{store_format} {codec}"
        settings: dict[str, Any] = {"store_format": store_format, "codec": codec, "batch_size": 256}
        caches[name] = make_cache(folder / name, latent_NCHW, samples_per_shard=options.samples_per_shard, **settings)
    return caches


def works_of(form: str, cache: Path) -> dict[str, Callable[[], object]]:
    files = files_of(cache)
    works: dict[str, Callable[[], object]] = {f"{form}: sha256sum": partial(hash_by_program, files)}
    for jobs in JOBS:
        works[f"{form}: hashlib, {jobs} jobs"] = partial(hash_by_library, files, jobs)
    for level, jobs in product(LEVELS, JOBS):
        works[f"{form}: {level}, {jobs} jobs"] = partial(verify_soundly, cache, level, jobs)
    return works


def files_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def hash_by_program(paths: list[Path]) -> None:
    subprocess.run(["sha256sum", *paths], stdout=subprocess.DEVNULL, check=True)


def hash_by_library(paths: list[Path], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(hash_file, paths))


def hash_file(path: Path) -> None:
    with path.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def verify_soundly(cache: Path, level: Level, jobs: int) -> None:
    verify(cache, level, jobs=jobs).raise_if_damaged()


def quick_seconds(path: Path, options: argparse.Namespace) -> list[float]:
    """Time level quick on a cache of many tiny shards; its cost does not depend on their size."""
    latent_NCHW = np.random.default_rng(0).standard_normal((options.quick_shards, 16, 4, 4), np.float32)
    cache = make_cache(path, latent_NCHW, samples_per_shard=1, batch_size=1)
    return interleaved_seconds({"quick": partial(verify_soundly, cache, "quick", 1)}, options.repeats)["quick"]


def ratios_of(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return how many times as fast as each baseline every level is, round by round."""
    ratios = {}
    for work, taken in seconds.items():
        form, name = work.split(": ")
        if name not in BASELINES:
            for baseline in BASELINES:
                ratios[f"{work} over {baseline}"] = speedups(seconds[f"{form}: {baseline}"], taken)
    return ratios


def print_table(
    speeds: dict[str, list[float]], ratios: dict[str, list[float]], quick: list[float], quick_shards: int
) -> None:
    print(f"{'':<32}{'GB/s':>8}{'range':>14}")
    for name, each in speeds.items():
        print(f"{name:<32}{median(each):>8.2f}{f'{min(each):.2f}-{max(each):.2f}':>14}")
    for name, each in ratios.items():
        print(f"{name:<46}{median(each):>8.2f}x  ({min(each):.2f}-{max(each):.2f})")
    print(f"quick: {median(quick) * 1_000 / quick_shards:.2f} s per 1,000 shards")


if __name__ == "__main__":
    sys.exit(main())
