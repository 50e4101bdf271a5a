"""Measure shuffled samples per second from an object store, uncached: `cache.read` against Lance, litdata and MDS.

Every side opens its data set at a URL and delivers one epoch of it in batches of float16 latents [256, 16, 28, 28], in
one process, with no file of it on this machine yet. `cache.read` and Lance take single samples from anywhere in the set
and request their ranges; `cache.read` reads three batches at a time, as the trainer does. The others shuffle larger
parts: `LatentStream` in blocks of 16 samples, 256 of them at a time; litdata and MDS fetch whole files of 64 MB and
shuffle among a few of them. Our programs check every sample's crc32c; the others check nothing. Lance runs twice: with
its defaults, and "hurried": without its own limit on requests, three batches at a time.

The store is a minimal server on loopback (`benchmarks/object_server.py`), which counts requests and bytes. So the
speeds are those of programs, not of networks, unless `--latency-ms` and `--connection-mb-per-s` imitate a network;
requests and bytes per sample are the same anywhere. Two bounds are shown: obstore fetching the same number of ranges,
one request each, without looking at the bytes; and obstore fetching the cache's files whole.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.object_server import BUCKET, Counts, add_network_options, network_of, serving, take_counts
from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.remote_peers import PEERS, Batches, Latents, installed_peers, read_at_random
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store import open_cache
from cache_store.errors import ConfigError
from cache_store.program.running import run_program
from tests.make_cache import make_cache
from trainer import LatentStream

# Axes: N samples, C channels, H W latent cells.

SHAPE = (16, 28, 28)
SAMPLE_BYTES = 2 * int(np.prod(SHAPE))
OURS, OURS_IN_BLOCKS = "cache.read", "LatentStream, in blocks"
BLOCK = 16
"""Neighbours that are shuffled together: 0.4 MB."""
BOUND_RANGES, BOUND_FILES = "obstore, a range a sample", "obstore, whole files"
IN_FLIGHT = 20
"""Threads of the first bound; each fetches a batch, of which obstore fetches ten ranges at a time."""
PACKAGES = ("numpy", "obstore", "pylance", "litdata", "mosaicml-streaming", "torch", "encode-once")

Pass = Callable[[int], int]
"""Reads one epoch in the order of a seed, with nothing cached; returns the number of samples."""


class Traffic(NamedTuple):
    """Requests and bytes per sample that one pass took from the server."""

    requests_a_sample: float
    bytes_a_sample: float


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.remote", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if options.batch_size > options.samples:
        raise ConfigError(f"--batch-size must be at most {options.samples}, the number of samples")
    with tempfile.TemporaryDirectory(prefix="remote-", dir=options.folder) as name:
        folder = Path(name)
        with serving(folder, network_of(options)) as endpoint:
            os.environ |= environment(endpoint)
            passes = prepare(folder, endpoint, options)
            traffic = {name: measured_traffic(each, endpoint) for name, each in passes.items()}
            works = {name: partial(each, 1) for name, each in passes.items()}
            seconds = interleaved_seconds(works, options.repeats)
    count = options.samples // options.batch_size * options.batch_size
    speeds = {name: rates(count, each) for name, each in seconds.items()}
    print_table(speeds, traffic)
    peers = [name for name in speeds if name in PEERS]
    ratios = {
        f"{ours} over {name}": spread(speedups(seconds[name], seconds[ours]), 2)
        for ours in (OURS, OURS_IN_BLOCKS)
        for name in (*peers, BOUND_RANGES, BOUND_FILES)
    }
    for name, each in ratios.items():
        print(f"{name}: {each['median']}x ({each['min']}-{each['max']})")
    for name in PEERS.keys() - peers:
        print(f"{name} is not installed: pip install '.[bench]', in an environment of its own")
    print_record(
        "remote",
        PACKAGES,
        options=vars(options),
        samples_per_s={name: spread(each, 0) for name, each in speeds.items()},
        fastest_peer=max(peers, key=lambda name: median(speeds[name]), default=None),
        ratios=ratios,
        traffic={name: each._asdict() for name, each in traffic.items()},
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "samples_per_shard", "folder", samples=20_000, batch_size=256, repeats=3)
    add_network_options(parser)
    return parser


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment by which every side finds the server, which ignores the keys."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    region = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1")
    return {**keys, **region, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


def prepare(folder: Path, endpoint: str, options: argparse.Namespace) -> dict[str, Pass]:
    """Write every form into the folder that is served; return a pass that reads each."""
    size, rng = options.batch_size, np.random.default_rng(0)
    latents = rng.standard_normal((options.samples, *SHAPE), np.float32).astype(np.float16)
    make_cache(folder / "cache", latents, samples_per_shard=options.samples_per_shard)
    url = f"s3://{BUCKET}/cache"
    sides: dict[str, Batches] = {OURS: partial(cache_batches, url, size), OURS_IN_BLOCKS: partial(blocks, url, size)}
    for name, make in installed_peers().items():
        sides[name] = make(folder / name, f"s3://{BUCKET}/{name}", latents, size, endpoint)
    passes: dict[str, Pass] = {name: partial(read_epoch, each, size) for name, each in sides.items()}
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / "cache/latents/c").glob("*/0/0/0"))
    passes[BOUND_RANGES] = partial(fetch_ranges, files, options)
    passes[BOUND_FILES] = partial(fetch_files, files, options)
    return passes


def cache_batches(url: str, batch_size: int, seed: int) -> Iterator[Latents]:
    cache = open_cache(url)
    yield from read_at_random(cache.read, len(cache), batch_size, seed)


def blocks(url: str, batch_size: int, seed: int) -> Iterator[Latents]:
    stream = LatentStream(url, batch_size, seed=seed, shuffle_block=BLOCK)
    for batch in islice(stream, len(stream.cache) // batch_size):
        yield batch["latents"].numpy()


def read_epoch(batches: Batches, batch_size: int, seed: int) -> int:
    """Read one epoch, and check that every batch suits a training step; return the number of samples."""
    seen = 0
    for batch in batches(seed):
        assert batch.shape == (batch_size, *SHAPE), batch.shape
        assert batch.dtype == np.float16, batch.dtype
        seen += len(batch)
    return seen


def fetch_ranges(files: Sequence[str], options: argparse.Namespace, seed: int) -> int:
    """Fetch as many ranges of a sample's size, at random places, with one request each."""
    from obstore.store import S3Store

    store, rng, batches = S3Store(BUCKET), np.random.default_rng(seed), options.samples // options.batch_size
    last = (min(options.samples, options.samples_per_shard) - 1) * SAMPLE_BYTES

    def fetch(file: str) -> None:
        starts = rng.integers(last, size=options.batch_size).tolist()
        store.get_ranges(file, starts=starts, lengths=[SAMPLE_BYTES] * len(starts), coalesce=0)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(fetch, (files[batch % max(1, len(files) - 1)] for batch in range(batches))))
    return int(batches * options.batch_size)


def fetch_files(files: Sequence[str], options: argparse.Namespace, seed: int) -> int:
    from obstore.store import S3Store

    store = S3Store(BUCKET)
    for file in files:
        store.get(file).bytes()
    return int(options.samples // options.batch_size * options.batch_size)


def measured_traffic(one_pass: Pass, endpoint: str) -> Traffic:
    take_counts(endpoint)
    count = one_pass(0)
    counts: Counts = take_counts(endpoint)
    return Traffic(round(counts.requests / count, 4), round(counts.sent_bytes / count))


def print_table(speeds: dict[str, list[float]], traffic: dict[str, Traffic]) -> None:
    print(f"{'':<28}{'samples/s':>12}{'range':>20}{'requests/sample':>18}{'bytes/sample':>14}")
    for name, each in speeds.items():
        extent, asked = f"{min(each):,.0f}-{max(each):,.0f}", traffic[name]
        print(f"{name:<28}{median(each):>12,.0f}{extent:>20}{asked.requests_a_sample:>18}{asked.bytes_a_sample:>14,}")


if __name__ == "__main__":
    sys.exit(main())
