"""Measure reading shuffled batches of a cache that is not in memory: samples per second, bytes read per sample.

One side asks the disk for every batch ahead, one touches one sample after another, and one is `cache.read` as it is,
which reads ahead once batches wait for the disk. The cache's pages are dropped from the page cache before each round,
so the results depend on the disk under `--folder` and its read-ahead (`/sys/block/*/queue/read_ahead_kb`). Each round
reads few batches of a large cache, as if memory held only a small part of it.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from benchmarks.timing import rates, speedups, spread
from cache_store import open_cache
from cache_store.cache.gather import ReadAhead, read_ahead
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.program.running import run_program
from tests.make_cache import make_cache

SHAPE = (16, 28, 28)
CODECS: tuple[CodecName, CodecName] = ("none", "zstd")


class AlwaysReadAhead(ReadAhead):
    @contextmanager
    def batch(self, addresses: NDArray[Any], lengths: NDArray[Any] | int) -> Iterator[None]:
        read_ahead(addresses, lengths)
        yield


class NeverReadAhead(ReadAhead):
    @contextmanager
    def batch(self, addresses: NDArray[Any], lengths: NDArray[Any] | int) -> Iterator[None]:
        yield


SIDES: dict[str, Callable[[], ReadAhead]] = {
    "read ahead": AlwaysReadAhead,
    "touched": NeverReadAhead,
    "as cache.read": ReadAhead,
}
PACKAGES = ("numpy", "pyarrow", "numcodecs", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.cold", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    count = options.batches * options.batch_size
    if count > options.samples:
        raise ConfigError(f"--batches times --batch-size must be at most {options.samples:,}, the number of samples")
    seconds: dict[str, list[float]] = {f"{codec}, {side}": [] for codec in CODECS for side in SIDES}
    read_bytes: dict[str, list[float]] = {name: [] for name in seconds}
    with tempfile.TemporaryDirectory(prefix="cold-", dir=options.folder) as folder:
        latents = np.random.default_rng(0).standard_normal((options.samples, *SHAPE), np.float32).astype(np.float16)
        size = {"samples_per_shard": options.samples_per_shard}
        caches = {codec: make_cache(Path(folder, codec), latents, codec=codec, **size) for codec in CODECS}
        for round_ in range(-1, options.repeats):
            order = np.random.default_rng(round_ + 1).permutation(options.samples)[:count]
            for codec, cache in caches.items():
                for side, make_read_ahead in SIDES.items():
                    taken, fetched = read_cold(cache, order.reshape(options.batches, -1), make_read_ahead())
                    if round_ >= 0:  # the first warms up
                        seconds[f"{codec}, {side}"].append(taken)
                        read_bytes[f"{codec}, {side}"].append(fetched / count)
    report(options, count, seconds, read_bytes)
    return 0


def option_parser() -> argparse.ArgumentParser:
    defaults = {"samples": 100_000, "batch_size": 256, "repeats": 5}
    parser = parser_with(__doc__, "samples_per_shard", "folder", **defaults)
    parser.add_argument("--batches", type=positive_int, default=8, help="read in each round")
    return parser


def read_cold(cache: Path, batches: np.ndarray, read_ahead: ReadAhead) -> tuple[float, int]:
    """Return the seconds, and the bytes that the disk read, for sample numbers [batches, batch size]."""
    gc.collect()  # mapped pages cannot be dropped
    drop_pages(cache)
    opened = open_cache(cache)
    opened.read_ahead = read_ahead
    for shard in range(opened.spec.num_shards):
        opened.shards.mapped(shard)
    before, start = disk_bytes(), time.perf_counter()
    for numbers in batches:
        opened.read(numbers)
    return time.perf_counter() - start, disk_bytes() - before


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    """Return the bytes that the disk has read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def report(
    options: argparse.Namespace, count: int, seconds: dict[str, list[float]], read_bytes: dict[str, list[float]]
) -> None:
    speeds = {name: spread(rates(count, each), 0) for name, each in seconds.items()}
    fetched = {name: spread(each, 0) for name, each in read_bytes.items()}
    pairs = {codec: (seconds[f"{codec}, touched"], seconds[f"{codec}, read ahead"]) for codec in CODECS}
    ratios = {codec: spread(speedups(*both), 1) for codec, both in pairs.items()}
    if not any(map(any, read_bytes.values())):
        print("nothing was read from a disk: --folder is in memory", file=sys.stderr)
    for name, speed in speeds.items():
        print(
            f"{name:<20}{speed['median']:>8,.0f} samples/s ({speed['min']:,.0f}-{speed['max']:,.0f})"
            f"{fetched[name]['median']:>12,.0f} bytes read per sample"
        )
    for codec, ratio in ratios.items():
        print(f"{codec}, read ahead over touched: {ratio['median']}x ({ratio['min']}-{ratio['max']})")
    results = {"samples_per_s": speeds, "disk_bytes_a_sample": fetched, "ratios": ratios}
    print_record("cold", PACKAGES, options=vars(options), **results)


if __name__ == "__main__":
    sys.exit(main())
