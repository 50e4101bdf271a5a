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
from typing import Any

import numpy as np

from benchmarks.harness import parser_with, positive_int, program, rates, ratios, report, spread, take_turns
from cache_store.format.array import CodecName
from cache_store.format.schema import StoreFormat
from cache_store.verify.scope import Level
from cache_store.verify.verify import verify
from tests.make_cache import make_cache

# Axes: N samples, C channels, H W latent cells.

SHAPE = (16, 28, 28)
FORMS: tuple[tuple[StoreFormat, CodecName], ...] = (("zarr", "none"), ("zarr", "zstd"), ("webdataset", "none"))
JOBS = (1, 2)
LEVELS: tuple[Level, ...] = ("full", "deep")
BASELINES = ("sha256sum", *(f"hashlib, {jobs} jobs" for jobs in JOBS))
PACKAGES = ("numpy", "pyarrow", "awscrt", "numcodecs", "encode-once")


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=options.folder) as name:
        folder = Path(name)
        caches = {f"{form} {codec}": make_form(folder, form, codec, options) for form, codec in FORMS}
        works = {f"{form}: {name}": each for form, path in caches.items() for name, each in works_of(path).items()}
        gc.freeze()  # as the command does
        seconds = take_turns(works, options.repeats)
        sizes = {form: sum(path.stat().st_size for path in files_of(cache)) for form, cache in caches.items()}
        tiny = np.random.default_rng(0).standard_normal((options.quick_shards, 16, 4, 4), np.float32)
        many = make_cache(folder / "many", tiny, samples_per_shard=1, batch_size=1)  # the size of shards costs nothing
        quick = take_turns({"quick": partial(verify_soundly, many, "quick", 1)}, options.repeats)["quick"]
    speeds = {name: rates(sizes[name.partition(":")[0]] / 1e9, taken) for name, taken in seconds.items()}
    over = {
        f"{form}: {ours} over {baseline}": ratios(speeds[f"{form}: {ours}"], speeds[f"{form}: {baseline}"])
        for form in caches
        for ours, baseline in product((f"{level}, {jobs} jobs" for level, jobs in product(LEVELS, JOBS)), BASELINES)
    }
    quick_s = spread([each * 1_000 / options.quick_shards for each in quick])
    report(options, PACKAGES, "gb_per_s", speeds, over, bytes=sizes, quick_s_per_1000_shards=quick_s)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "samples_per_shard", "repeats", "folder", samples=40_960)
    parser.add_argument("--quick-shards", type=positive_int, default=2_000, help="tiny shards, for level quick")
    return parser


def make_form(folder: Path, form: StoreFormat, codec: CodecName, options: argparse.Namespace) -> Path:
    """Write a cache of noise, the same in every form."""
    latent_NCHW = np.random.default_rng(0).standard_normal((options.samples, *SHAPE), np.float32)
    size: dict[str, Any] = {"samples_per_shard": options.samples_per_shard, "batch_size": 256}
    return make_cache(folder / f"{form} {codec}", latent_NCHW, store_format=form, codec=codec, **size)


def works_of(cache: Path) -> dict[str, Callable[[], object]]:
    files = files_of(cache)
    command = ["sha256sum", *map(str, files)]
    works: dict[str, Callable[[], object]] = {
        "sha256sum": partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
    }
    works |= {f"hashlib, {jobs} jobs": partial(hash_all, files, jobs) for jobs in JOBS}
    return works | {
        f"{level}, {jobs} jobs": partial(verify_soundly, cache, level, jobs) for level, jobs in product(LEVELS, JOBS)
    }


def files_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def hash_all(paths: list[Path], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(hash_file, paths))


def hash_file(path: Path) -> None:
    with path.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def verify_soundly(cache: Path, level: Level, jobs: int) -> None:
    verify(cache, level, jobs=jobs).raise_if_damaged()


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
