"""Shuffled samples per second into batches, one process: `cache.read` against the formats people use today.

Every side delivers the same thing: batches of 256 float16 latents [256, 16, 28, 28] as one numpy array, in a new random
order each pass, from the page cache. webdataset shuffles in a buffer, the others globally. The rivals check nothing;
`cache.read` is timed with and without its crc32c.

A data set of Hugging Face's datasets is read in every way that its users do, the last being Arrow's own gather with its
buffer taken as the batch. A bound stands beside the rivals: numpy's gather from an array in memory, which is one memcpy
a sample in C.
"""

import argparse
import io
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
import webdataset
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store import open_cache
from cache_store.cache.gather import WAYS, move_rows
from cache_store.errors import ConfigError
from cache_store.format.names import ZARR_ARRAY
from cache_store.format.schema import CodecName
from cache_store.program.command_line import Parser
from cache_store.program.run_program import run_program
from tests.make_cache import make_cache

# Axes: N samples, C channels, H W latent cells.

Latents = NDArray[np.float16]
Order = Callable[[np.random.Generator], Iterator[NDArray[np.int64]]]
Batches = Callable[[np.random.Generator], Iterable[Latents]]

SHAPE = (16, 28, 28)
SHUFFLE_BUFFER = 1_000
"""webdataset's own default order of magnitude."""
RIVALS = (
    "webdataset",
    "one .pt an image",
    "datasets numpy format",
    "datasets item by item",
    "datasets in a DataLoader",
    "datasets batch joined",
    "datasets arrow format",
)
BOUNDS = ("gather in memory",)
OURS = ("cache.read checked", "cache.read unchecked", "cache.read zstd checked", "cache.read zstd unchecked")
CODECS: tuple[CodecName, CodecName] = ("none", "zstd")
FAST = {
    "datasets item by item": 2,
    "datasets in a DataLoader": 5,
    "datasets batch joined": 5,
    "datasets arrow format": 10,
    "gather in memory": 10,
    "cache.read checked": 10,
    "cache.read unchecked": 15,
}
PACKAGES = ("numpy", "torch", "webdataset", "datasets", "awscrt", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.loader", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if not 1 <= options.batch_size <= options.samples:
        raise ConfigError(f"--batch-size must be in [1, {options.samples}], the number of samples")
    datasets.disable_progress_bars()
    with work_folder(options.folder) as folder:
        loaders = prepare(folder, make_latents(options), options.batch_size, options.samples_per_shard)
        disk_bytes = {codec: folder_bytes(folder / codec / ZARR_ARRAY) for codec in CODECS}
        count = options.samples // options.batch_size * options.batch_size
        works = {name: partial(run_passes, loader, count, options, passes(name)) for name, loader in loaders.items()}
        rounds = interleaved_seconds(works, options.repeats)
    seconds = {name: [each / passes(name) for each in taken] for name, taken in rounds.items()}
    speeds = {name: rates(count, each) for name, each in seconds.items()}
    fastest = max(RIVALS, key=lambda name: median(speeds[name]))
    print_table(speeds)
    print("bytes on disk, codec " + ", ".join(f"{codec} {size:,}" for codec, size in disk_bytes.items()))
    ratios = {
        f"{ours} over {rival}": spread(speedups(seconds[rival], seconds[ours]), 1)
        for ours in OURS
        for rival in RIVALS + BOUNDS
    }
    print_ratios(ratios)
    figures = {name: spread(each, 0) for name, each in speeds.items()}
    conditions = {"options": vars(options), "cache.read copies": "row by row" if move_rows in WAYS else "in C"}
    measured = {"samples_per_s": figures, "fastest_rival": fastest, "ratios": ratios, "disk_bytes": disk_bytes}
    print_record("loader", PACKAGES, **conditions, **measured)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="20,000 are 0.5 GB in each format")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument(
        "--samples-per-shard", type=int, default=4_096, help="128 spreads batches as 640,000 samples do"
    )
    parser.add_argument("--repeats", type=int, default=5, help="passes of each side, after one that warms up")
    parser.add_argument("--latents", help=".npy of real latents [N, C, y, x] to cut samples from; else noise")
    parser.add_argument("--folder", help="where the data sets are written; default a temporary folder")
    return parser


@contextmanager
def work_folder(folder: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loader-", dir=folder) as path:
        yield Path(path)


def make_latents(options: argparse.Namespace) -> Latents:
    """[N, C, H, W] of real latents cut at random places, or of noise; noise does not compress."""
    rng = np.random.default_rng(0)
    if options.latents is None:
        return rng.standard_normal((options.samples, *SHAPE), np.float32).astype(np.float16)
    frames = np.load(options.latents, mmap_mode="r")
    out = np.empty((options.samples, *SHAPE), np.float16)
    for sample in out:
        frame = frames[rng.integers(len(frames))]
        y, x = (rng.integers(size - 28 + 1) for size in frame.shape[1:])
        sample[:] = frame[:, y : y + 28, x : x + 28]
    return out


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def prepare(folder: Path, latents: Latents, batch_size: int, samples_per_shard: int) -> dict[str, Batches]:
    """Write every format; a loader of each."""
    plain, packed = (
        make_cache(folder / codec, latents, codec=codec, samples_per_shard=samples_per_shard) for codec in CODECS
    )
    order = partial(global_order, len(latents), batch_size)
    stored = store_bytes(folder / "hf-bytes", latents)
    return {
        "webdataset": webdataset_loader(folder / "tars", latents, batch_size),
        "one .pt an image": torch_loader(folder / "pt", latents, order),
        "datasets numpy format": numpy_format_loader(folder / "hf-lists", latents, order),
        "datasets item by item": item_loader(stored, order),
        "datasets in a DataLoader": data_loader(stored, order),
        "datasets batch joined": joined_loader(stored, order),
        "datasets arrow format": arrow_loader(stored, order),
        "gather in memory": memory_loader(latents, order, batch_size),
        "cache.read checked": cache_loader(plain, order, batch_size, check=True),
        "cache.read unchecked": cache_loader(plain, order, batch_size, check=False),
        "cache.read zstd checked": cache_loader(packed, order, batch_size, check=True),
        "cache.read zstd unchecked": cache_loader(packed, order, batch_size, check=False),
    }


def passes(name: str) -> int:
    """Passes in a round: the fast sides work for about as long as the slow ones, so that none is timed in a blink."""
    return FAST.get(name, 1)


def run_passes(loader: Batches, count: int, options: argparse.Namespace, number: int) -> None:
    """Passes over the whole batches; every batch must be what a training step would take."""
    for seed in range(number):
        seen = 0
        for batch in loader(np.random.default_rng(seed)):
            assert batch.shape == (options.batch_size, *SHAPE), batch.shape
            seen += len(batch)
        assert seen == count, (seen, count)


def global_order(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    order = rng.permutation(count)
    for start in range(0, count - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def by_batch(order: Order, read: Callable[[NDArray[np.int64]], Latents]) -> Batches:
    return lambda rng: map(read, order(rng))


def as_batch(values: Any) -> Latents:
    """Bytes of whole samples, uncopied."""
    return np.frombuffer(values, np.float16).reshape(-1, *SHAPE)


def cache_loader(path: Path, order: Order, batch_size: int, *, check: bool) -> Batches:
    """One buffer for every batch, as `out` is for."""
    cache = open_cache(path)

    def batches(rng: np.random.Generator) -> Iterator[Latents]:
        out = np.empty((batch_size, *SHAPE), np.float16)
        for numbers in order(rng):
            yield cache.read(numbers, out=out, check=check)

    return batches


def webdataset_loader(folder: Path, latents: Latents, batch_size: int) -> Batches:
    """Tars of 1,000 samples, as webdataset's own pipeline reads, shuffles, decodes and batches them."""
    folder.mkdir()
    for first in range(0, len(latents), 1_000):
        write_tar(folder / f"{first:06d}.tar", latents, range(first, min(first + 1_000, len(latents))))
    shards = sorted(str(path) for path in folder.iterdir())

    def batches(rng: np.random.Generator) -> Iterable[Latents]:
        pipeline = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=int(rng.integers(2**31)))
        samples = pipeline.shuffle(SHUFFLE_BUFFER).decode().to_tuple("npy")
        return (batch for (batch,) in samples.batched(batch_size, partial=False))

    return batches


def write_tar(path: Path, latents: Latents, rows: range) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in rows:
            stream = io.BytesIO()
            np.save(stream, latents[row])
            member = tarfile.TarInfo(f"{row:09d}.npy")
            member.size = stream.tell()
            stream.seek(0)
            tar.addfile(member, stream)


def numpy_format_loader(folder: Path, latents: Latents, order: Order) -> Batches:
    """Map-style over Arrow with the library's own numpy format; it gives float32, which we round back."""
    flat = datasets.List(datasets.Value("float16"), length=int(np.prod(SHAPE)))
    stored = store_dataset(folder, {"latent": flat}, ({"latent": sample.reshape(-1)} for sample in latents))
    table = stored.with_format("numpy")
    return by_batch(order, lambda numbers: table[numbers]["latent"].astype(np.float16).reshape(-1, *SHAPE))


def store_bytes(folder: Path, latents: Latents) -> datasets.Dataset:
    """Each latent as a binary value."""
    features = {"latent": datasets.Value("binary")}
    return store_dataset(folder, features, ({"latent": sample.tobytes()} for sample in latents))


def item_loader(stored: datasets.Dataset, order: Order) -> Batches:
    """Map-style over Arrow: by index, one item at a time."""
    return by_batch(order, lambda numbers: collate([stored[int(number)] for number in numbers]))


def data_loader(stored: datasets.Dataset, order: Order) -> Batches:
    """PyTorch's DataLoader in this process, which asks such a data set for whole batches (`__getitems__`)."""

    def batches(rng: np.random.Generator) -> Iterator[Latents]:
        numbers = [each.tolist() for each in order(rng)]
        return iter(torch.utils.data.DataLoader(stored, batch_sampler=numbers, collate_fn=collate))

    return batches


def collate(items: list[dict[str, bytes]]) -> Latents:
    return np.stack([np.frombuffer(item["latent"], np.float16) for item in items]).reshape(-1, *SHAPE)


def joined_loader(stored: datasets.Dataset, order: Order) -> Batches:
    """By index, a batch at a time, its values joined: a batch that cannot be written to."""
    return by_batch(order, lambda numbers: as_batch(b"".join(stored[numbers]["latent"])))


def arrow_loader(stored: datasets.Dataset, order: Order) -> Batches:
    """By index, a batch at a time; the buffer of values is the batch, since all are of one length."""
    table = stored.with_format("arrow")

    def read(numbers: NDArray[np.int64]) -> Latents:
        _, _, values = table[numbers]["latent"].combine_chunks().buffers()
        return as_batch(values)

    return by_batch(order, read)


def memory_loader(latents: Latents, order: Order, batch_size: int) -> Batches:
    def batches(rng: np.random.Generator) -> Iterator[Latents]:
        out = np.empty((batch_size, *SHAPE), np.float16)
        for numbers in order(rng):
            yield np.take(latents, numbers, axis=0, out=out, mode="clip")  # other modes copy once more

    return batches


def store_dataset(folder: Path, features: dict[str, Any], rows: Iterator[dict[str, Any]]) -> datasets.Dataset:
    """Through the library's writer to disk and back, so that it is read by mmap as users have it."""
    with ArrowWriter(path=str(folder.with_suffix(".arrow")), features=datasets.Features(features)) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(str(folder.with_suffix(".arrow")))


def torch_loader(folder: Path, latents: Latents, order: Order) -> Batches:
    folder.mkdir()
    for row, sample in enumerate(latents):
        torch.save(torch.from_numpy(sample), folder / f"{row:09d}.pt")

    def read(numbers: NDArray[np.int64]) -> Latents:
        return torch.stack([torch.load(folder / f"{number:09d}.pt") for number in numbers]).numpy()

    return by_batch(order, read)


def print_table(speeds: dict[str, list[float]]) -> None:
    print(f"{'':<28}{'samples/s':>12}{'range':>22}")
    for name, each in speeds.items():
        extent = f"{min(each):,.0f}-{max(each):,.0f}"
        print(f"{name:<28}{median(each):>12,.0f}{extent:>22}")


def print_ratios(ratios: dict[str, dict[str, float]]) -> None:
    """Rivals down, our ways of reading across: how many times faster ours is."""
    print(f"{'':<28}" + "".join(f"{ours:>26}" for ours in OURS))
    for rival in RIVALS + BOUNDS:
        row = [ratios[f"{ours} over {rival}"] for ours in OURS]
        cells = [f"{ratio['median']:.1f}x ({ratio['min']:.1f}-{ratio['max']:.1f})" for ratio in row]
        print(f"{rival:<28}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
