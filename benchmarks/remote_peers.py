"""Lance, litdata and MDS: store samples, and read them shuffled from an object store, as each documentation advises."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.prefetch import prefetched
from trainer.run.session import FETCHING_THREADS

# Axes: N samples, C channels, H W latent cells.

Latents = NDArray[np.float16]
Batches = Callable[[int], Iterator[Latents]]
"""Yields whole batches in the order of a seed, with nothing on this machine's disk at the start."""

PART_BYTES = 64 << 20
"""Bytes of a chunk or shard; the default of litdata and MDS."""

UNLIMITED = {
    "lance_aimd_initial_rate": "1000000",
    "lance_aimd_max_rate": "0",
    "lance_aimd_burst_capacity": "10000",
}
"""Options that remove Lance's own limit, at first 2,000 requests a second, which suits clouds; others have none."""


def read_at_random(
    read: Callable[[NDArray[np.int64]], Latents], count: int, size: int, seed: int, threads: int = FETCHING_THREADS
) -> Iterator[Latents]:
    """Yield shuffled batches of `size` out of `count` samples, reading several at a time, as the trainer does."""
    order = np.random.default_rng(seed).permutation(count)
    parts = (order[start : start + size] for start in range(0, count - size + 1, size))
    with closing(prefetched(read, parts, threads)) as batches:
        yield from batches


def lance_batches(hurried: bool, folder: Path, url: str, latents: Latents, batch_size: int, endpoint: str) -> Batches:
    """Write Lance's own format, a column of fixed-size lists; return a reader of random rows, which keeps nothing.

    By default it reads batch after batch; `hurried` removes its limit and reads several batches at a time, as ours.
    """
    import lance
    import pyarrow as pa

    flat = pa.array(latents.reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, latents[0].size)
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


def mds_batches(folder: Path, url: str, latents: Latents, batch_size: int, endpoint: str) -> Batches:
    """Write shards; return a reader that fetches whole ones ahead, keeps them, and shuffles in blocks of a few."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    shape = ",".join(map(str, latents.shape[1:]))
    with MDSWriter(out=str(folder), columns={"latent": f"ndarray:float16:{shape}"}, size_limit=PART_BYTES) as writer:
        for sample in latents:
            writer.write({"latent": sample})
    os.environ["S3_ENDPOINT_URL"] = endpoint

    def batches(seed: int) -> Iterator[Latents]:
        clean_stale_shared_memory()
        with tempfile.TemporaryDirectory() as local:
            stored = StreamingDataset(remote=url, local=local, shuffle=True, shuffle_seed=seed, batch_size=batch_size)
            for batch in DataLoader(stored, batch_size=batch_size, drop_last=True):
                yield batch["latent"].numpy()

    return batches


PEERS: dict[str, tuple[str, Callable[..., Batches]]] = {
    "Lance": ("lance", partial(lance_batches, False)),
    "Lance-hurried": ("lance", partial(lance_batches, True)),
    "litdata": ("litdata", litdata_batches),
    "MDS": ("streaming", mds_batches),
}
"""Each peer's module, and the function that writes latents in its form and returns a reader for a URL."""


def installed_peers() -> dict[str, Callable[..., Any]]:
    return {name: make for name, (module, make) in PEERS.items() if find_spec(module)}
