"""Measure shuffled samples per second from an object store, uncached: `cache.read` against Lance and litdata.

Every side opens its data set at a URL and delivers one epoch of it in batches of float16 latents [256, 16, 28, 28], in
one process, with no file of it on this machine yet. `cache.read` and Lance take single samples from anywhere in the set
and request their ranges; `cache.read` reads three batches at a time, as the trainer does. The others shuffle larger
parts: `LatentStream` in blocks of 16 samples, 256 of them at a time; litdata fetches whole files of 64 MB and shuffles
among a few of them. Our programs check every sample's crc32c; the others check nothing. Lance runs twice: with its
defaults, and "hurried": without its own limit on requests, three batches at a time.

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
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import parser_with, program, rates, ratios, report, take_turns
from benchmarks.object_server import BUCKET, add_network_options, environment, network_of, serving, take_counts
from cache_store import open_cache
from cache_store.errors import ConfigError
from tests.make_cache import make_cache
from trainer import LatentStream
from trainer.data.prefetch import prefetched
from trainer.run.session import FETCHING_THREADS

# Axes: N samples, C channels, H W latent cells.

Latents = NDArray[np.float16]
Batches = Callable[[int], Iterator[Latents]]
"""Yields whole batches in the order of a seed, with nothing on this machine's disk at the start."""
Pass = Callable[[int], int]
"""Reads one epoch in the order of a seed, with nothing cached; returns the number of samples."""

SHAPE = (16, 28, 28)
SAMPLE_BYTES = 2 * int(np.prod(SHAPE))
OURS, OURS_IN_BLOCKS = "cache.read", "LatentStream, in blocks"
BLOCK = 16
"""Neighbours that are shuffled together: 0.4 MB."""
BOUND_RANGES, BOUND_FILES = "obstore, a range a sample", "obstore, whole files"
IN_FLIGHT = 20
"""Threads of the first bound; each fetches a batch, of which obstore fetches ten ranges at a time."""
PART_BYTES = 64 << 20
"""Bytes of a chunk of litdata, its default."""
UNLIMITED = {"lance_aimd_initial_rate": "1000000", "lance_aimd_max_rate": "0", "lance_aimd_burst_capacity": "10000"}
"""Options that remove Lance's own limit, at first 2,000 requests a second, which suits clouds; others have none."""
PACKAGES = ("numpy", "obstore", "pylance", "litdata", "torch", "encode-once")


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
            seconds = take_turns({name: partial(each, 1) for name, each in passes.items()}, options.repeats)
    count = options.samples // options.batch_size * options.batch_size
    speeds = {name: rates(count, each) for name, each in seconds.items()}
    over = {
        f"{ours} over {name}": ratios(speeds[ours], speeds[name])
        for ours in (OURS, OURS_IN_BLOCKS)
        for name in speeds
        if name not in (OURS, OURS_IN_BLOCKS)
    }
    missing = [name for name in PEERS if name not in speeds]
    report(options, PACKAGES, "samples_per_s", speeds, over, traffic=traffic, not_installed=missing)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "samples_per_shard", "folder", samples=20_000, batch_size=256, repeats=3)
    add_network_options(parser)
    return parser


def prepare(folder: Path, endpoint: str, options: argparse.Namespace) -> dict[str, Pass]:
    """Write every form into the folder that is served; return a pass that reads each."""
    size, rng = options.batch_size, np.random.default_rng(0)
    latents = rng.standard_normal((options.samples, *SHAPE), np.float32).astype(np.float16)
    make_cache(folder / "cache", latents, samples_per_shard=options.samples_per_shard)
    url = f"s3://{BUCKET}/cache"
    sides: dict[str, Batches] = {OURS: partial(cache_batches, url, size), OURS_IN_BLOCKS: partial(blocks, url, size)}
    for name, (module, make) in PEERS.items():
        if find_spec(module):
            sides[name] = make(folder / name, f"s3://{BUCKET}/{name}", latents, size, endpoint)
    passes: dict[str, Pass] = {name: partial(read_epoch, each, size) for name, each in sides.items()}
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / "cache/latents").glob("*/c/*/0/0/0"))
    passes[BOUND_RANGES] = partial(fetch_ranges, files, options)
    passes[BOUND_FILES] = partial(fetch_files, files, options)
    return passes


def cache_batches(url: str, batch_size: int, seed: int) -> Iterator[Latents]:
    cache = open_cache(url)
    yield from read_at_random(cache.read, len(cache), batch_size, seed)


def read_at_random(
    read: Callable[[NDArray[np.int64]], Latents], count: int, size: int, seed: int, threads: int = FETCHING_THREADS
) -> Iterator[Latents]:
    """Yield shuffled batches of `size` out of `count` samples, reading several at a time, as the trainer does."""
    order = np.random.default_rng(seed).permutation(count)
    parts = (order[start : start + size] for start in range(0, count - size + 1, size))
    with closing(prefetched(read, parts, threads)) as batches:
        yield from batches


def blocks(url: str, batch_size: int, seed: int) -> Iterator[Latents]:
    stream = LatentStream(url, batch_size, seed=seed, shuffle_block=BLOCK)
    for batch in islice(stream, len(stream.cache) // batch_size):
        yield batch["latents"].numpy()


def lance_batches(hurried: bool, folder: Path, url: str, latents: Latents, batch_size: int, endpoint: str) -> Batches:
    """Write Lance's own format, a column of fixed-size lists; return a reader of random rows, which keeps nothing."""
    import lance
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(latents.reshape(-1)), latents[0].size)
    lance.write_dataset(pa.table({"latent": column}), str(folder))
    options = {"aws_endpoint": endpoint, "allow_http": "true", "aws_region": "us-east-1"}
    options, threads = (options | UNLIMITED, FETCHING_THREADS) if hurried else (options, 1)

    def batches(seed: int) -> Iterator[Latents]:
        stored = lance.dataset(url, storage_options=options)

        def read(numbers: NDArray[np.int64]) -> Latents:
            table = stored.take(numbers.tolist(), columns=["latent"])
            flat = table["latent"].combine_chunks().values.to_numpy(zero_copy_only=True)
            return np.asarray(flat.reshape(-1, *latents.shape[1:]), np.float16)

        yield from read_at_random(read, len(latents), batch_size, seed, threads)

    return batches


def litdata_batches(folder: Path, url: str, latents: Latents, batch_size: int, endpoint: str) -> Batches:
    """Write chunks; return a reader that fetches whole ones ahead, keeps them, and shuffles among and within them."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader
    from litdata.streaming.writer import BinaryWriter

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litdata has no option for plain HTTP
    writer = BinaryWriter(str(folder), chunk_bytes=PART_BYTES)
    for row, sample in enumerate(latents):
        writer[row] = sample
    writer.done()
    writer.merge()
    options = {"endpoint_url": endpoint}

    def batches(seed: int) -> Iterator[Latents]:
        with tempfile.TemporaryDirectory() as local:
            stored = StreamingDataset(url, cache_dir=local, shuffle=True, seed=seed, storage_options=options)
            for batch in StreamingDataLoader(stored, batch_size=batch_size, drop_last=True):
                yield batch.numpy()

    return batches


PEERS: dict[str, tuple[str, Callable[..., Batches]]] = {
    "Lance": ("lance", partial(lance_batches, False)),
    "Lance-hurried": ("lance", partial(lance_batches, True)),
    "litdata": ("litdata", litdata_batches),
}
"""Each peer's module, and the function that writes latents in its form and returns a reader for a URL."""


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


def measured_traffic(one_pass: Pass, endpoint: str) -> dict[str, float]:
    """Return requests and bytes per sample that one pass took from the server."""
    take_counts(endpoint)
    count = one_pass(0)
    counts = take_counts(endpoint)
    return {
        "requests_a_sample": round(counts.requests / count, 4),
        "bytes_a_sample": round(counts.sent_bytes / count),
    }


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
