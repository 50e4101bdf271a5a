"""Measure shuffled samples per second in one process: `cache.read` against the formats that people use today.

Every side delivers the same: batches of 256 float16 latents [256, 16, 28, 28] as one numpy array, in a new random order
each pass, from the page cache. webdataset shuffles in a buffer, the others globally. Zarr's own readers check each
sample's crc32c, the other rivals nothing; `cache.read` is timed with and without its crc32c. Sides named "in order"
read the batches in row order.

Hugging Face's datasets is read in every way that its users read it; the last is Arrow's own gather, whose buffer is
used as the batch. numpy's gather from an array in memory, one memcpy per sample in C, is shown as a bound.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from benchmarks.loader_zarr import MISSING, READERS, installed_readers
from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store import open_cache
from cache_store.cache.gather import copy_rows, move_rows
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.format.layout import ZARR_ARRAY
from cache_store.program.running import run_program
from tests.make_cache import make_cache

# Axes: N samples, C channels, H W latent cells.

Latents = NDArray[np.float16]
Order = Callable[[np.random.Generator], Iterator[NDArray[np.int64]]]
Batches = Callable[[np.random.Generator], Iterable[Latents]]

IN_ORDER = ", in order"
SHAPE = (16, 28, 28)
SHUFFLE_BUFFER = 1_000
"""webdataset's own default order of magnitude."""
PASSES = {
    "webdataset": 1,
    "one .pt an image": 1,
    "datasets numpy format": 1,
    "datasets item by item": 2,
    "datasets in a DataLoader": 5,
    "datasets batch joined": 5,
    "datasets arrow format": 10,
    **{name: 5 if name == "TensorStore" else 1 for name in READERS},
    "gather in memory": 10,
    "cache.read checked": 10,
    "cache.read unchecked": 15,
    "cache.read zstd checked": 1,
    "cache.read zstd unchecked": 1,
    **{f"{name}{IN_ORDER}": 1 if name == "zarr-python" else 5 for name in READERS},
    f"cache.read checked{IN_ORDER}": 10,
}
"""Passes of each side in a round. Fast sides get more passes, so that every round is long enough to time."""
SHUFFLED = tuple(name for name in PASSES if not name.endswith(IN_ORDER))
OURS = tuple(name for name in SHUFFLED if name.startswith("cache.read"))
BOUND = "gather in memory"
CODECS: tuple[CodecName, CodecName] = ("none", "zstd")
PACKAGES = ("numpy", "torch", "webdataset", "datasets", "zarr", "zarrs", "tensorstore", "awscrt", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.loader", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if options.batch_size > options.samples:
        raise ConfigError(f"--batch-size must be at most {options.samples}, the number of samples")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="loader-", dir=options.folder) as name:
        folder = Path(name)
        loaders = prepare(folder, make_latents(options), options.batch_size, options.samples_per_shard)
        disk_bytes = {codec: folder_bytes(folder / codec / ZARR_ARRAY) for codec in CODECS}
        count = options.samples // options.batch_size * options.batch_size
        works = {name: partial(run_passes, loader, count, options, PASSES[name]) for name, loader in loaders.items()}
        rounds = interleaved_seconds(works, options.repeats)
    seconds = {name: [each / PASSES[name] for each in taken] for name, taken in rounds.items()}
    speeds = {name: rates(count, each) for name, each in seconds.items()}
    rivals = [name for name in SHUFFLED if name in speeds and name not in (*OURS, BOUND)]
    print_table(speeds)
    print("bytes on disk, codec " + ", ".join(f"{codec} {size:,}" for codec, size in disk_bytes.items()))
    pairs = [(ours, rival) for ours in OURS for rival in (*rivals, BOUND)]
    pairs += [(f"{OURS[0]}{IN_ORDER}", f"{name}{IN_ORDER}") for name in READERS if name not in MISSING]
    ratios = {f"{ours} over {rival}": spread(speedups(seconds[rival], seconds[ours]), 1) for ours, rival in pairs}
    print_ratios(ratios, rivals)
    print_record(
        "loader",
        PACKAGES,
        **{"options": vars(options), "cache.read copies": "row by row" if copy_rows is move_rows else "in C"},
        samples_per_s={name: spread(each, 0) for name, each in speeds.items()},
        skipped=MISSING,
        fastest_rival=max(rivals, key=lambda name: median(speeds[name])),
        ratios=ratios,
        disk_bytes=disk_bytes,
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "samples_per_shard", "repeats", "folder", samples=20_000, batch_size=256)
    parser.add_argument("--latents", help=".npy of real latents [N, C, y, x] to cut samples from; default: noise")
    return parser


def make_latents(options: argparse.Namespace) -> Latents:
    """Return latents [N, C, H, W], cut from real ones at random places, or noise. Noise does not compress."""
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
    """Write every format; return a loader for each."""
    plain, packed = (
        open_cache(make_cache(folder / codec, latents, codec=codec, samples_per_shard=samples_per_shard))
        for codec in CODECS
    )
    order = partial(global_order, len(latents), batch_size)
    buffered = partial(buffered_loader, order, batch_size)
    slices = partial(row_order, len(latents), batch_size)
    readers = installed_readers(folder / CODECS[0] / ZARR_ARRAY)
    return {
        "webdataset": webdataset_loader(folder / "tars", latents, batch_size),
        "one .pt an image": torch_loader(folder / "pt", latents, order),
        **datasets_loaders(folder, latents, order),
        **{name: by_batch(order, read) for name, read in readers.items()},
        "gather in memory": buffered(partial(np.take, latents, axis=0, mode="clip")),  # other modes copy once more
        "cache.read checked": buffered(plain.read),
        "cache.read unchecked": buffered(partial(plain.read, check=False)),
        "cache.read zstd checked": buffered(packed.read),
        "cache.read zstd unchecked": buffered(partial(packed.read, check=False)),
        **{f"{name}{IN_ORDER}": by_batch(slices, read) for name, read in readers.items()},
        f"cache.read checked{IN_ORDER}": buffered_loader(partial(numbers_of, slices), batch_size, plain.read),
    }


def run_passes(loader: Batches, count: int, options: argparse.Namespace, number: int) -> None:
    """Do `number` passes over all whole batches, and check that every batch is what a training step would take."""
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


def row_order(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[slice]:
    return (slice(start, start + batch_size) for start in range(0, count - batch_size + 1, batch_size))


def numbers_of(slices: Callable[[np.random.Generator], Iterator[slice]], rng: np.random.Generator) -> Iterator[Any]:
    return (np.arange(each.start, each.stop) for each in slices(rng))


def by_batch(order: Callable[[np.random.Generator], Iterator[Any]], read: Callable[[Any], Latents]) -> Batches:
    return lambda rng: map(read, order(rng))


def as_batch(values: Any) -> Latents:
    """View the bytes of whole samples as a batch, without a copy."""
    return np.frombuffer(values, np.float16).reshape(-1, *SHAPE)


def buffered_loader(order: Order, batch_size: int, read: Callable[..., Latents]) -> Batches:
    """Return a loader that reads every batch into one buffer, given as `out`."""

    def batches(rng: np.random.Generator) -> Iterator[Latents]:
        out = np.empty((batch_size, *SHAPE), np.float16)
        return (read(numbers, out=out) for numbers in order(rng))

    return batches


def webdataset_loader(folder: Path, latents: Latents, batch_size: int) -> Batches:
    """Write tars of 1,000 samples; return a loader by webdataset's own pipeline."""
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=1_000, verbose=0) as sink:
        for row, sample in enumerate(latents):
            sink.write({"__key__": f"{row:09d}", "npy": sample})
    shards = sorted(str(path) for path in folder.iterdir())

    def batches(rng: np.random.Generator) -> Iterable[Latents]:
        pipeline = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=int(rng.integers(2**31)))
        samples = pipeline.shuffle(SHUFFLE_BUFFER).decode().to_tuple("npy")
        return (batch for (batch,) in samples.batched(batch_size, partial=False))

    return batches


def datasets_loaders(folder: Path, latents: Latents, order: Order) -> dict[str, Batches]:
    """Return map-style loaders over Arrow: lists of float16 in numpy format, binary values in four ways."""
    flat = datasets.List(datasets.Value("float16"), length=int(np.prod(SHAPE)))
    lists = store_dataset(folder / "hf-lists", flat, (sample.reshape(-1) for sample in latents)).with_format("numpy")
    stored = store_dataset(folder / "hf-bytes", datasets.Value("binary"), (sample.tobytes() for sample in latents))
    table = stored.with_format("arrow")

    def loaded(rng: np.random.Generator) -> Iterator[Latents]:
        """Load in this process; PyTorch asks such a data set for whole batches (`__getitems__`)."""
        numbers = [each.tolist() for each in order(rng)]
        return iter(torch.utils.data.DataLoader(stored, batch_sampler=numbers, collate_fn=collate))

    def gathered(numbers: NDArray[np.int64]) -> Latents:
        """Use Arrow's buffer of values as the batch; all values have one length."""
        _, _, values = table[numbers]["latent"].combine_chunks().buffers()
        return as_batch(values)

    def rounded(numbers: NDArray[np.int64]) -> Latents:
        """Convert to float16: the format gives float32."""
        batch: Latents = lists[numbers]["latent"].astype(np.float16).reshape(-1, *SHAPE)
        return batch

    return {
        "datasets numpy format": by_batch(order, rounded),
        "datasets item by item": by_batch(order, lambda numbers: collate([stored[int(number)] for number in numbers])),
        "datasets in a DataLoader": loaded,
        "datasets batch joined": by_batch(order, lambda numbers: as_batch(b"".join(stored[numbers]["latent"]))),
        "datasets arrow format": by_batch(order, gathered),
    }


def collate(items: list[dict[str, bytes]]) -> Latents:
    return np.stack([np.frombuffer(item["latent"], np.float16) for item in items]).reshape(-1, *SHAPE)


def store_dataset(file: Path, kind: Any, values: Iterable[Any]) -> datasets.Dataset:
    """Write values with the library's own writer and open the file, memory-mapped as for users."""
    with ArrowWriter(path=str(file), features=datasets.Features({"latent": kind})) as writer:
        for value in values:
            writer.write({"latent": value})
        writer.finalize()
    return datasets.Dataset.from_file(str(file))


def torch_loader(folder: Path, latents: Latents, order: Order) -> Batches:
    folder.mkdir()
    for row, sample in enumerate(latents):
        torch.save(torch.from_numpy(sample), folder / f"{row:09d}.pt")

    def read(numbers: NDArray[np.int64]) -> Latents:
        return torch.stack([torch.load(folder / f"{number:09d}.pt") for number in numbers]).numpy()

    return by_batch(order, read)


def print_table(speeds: dict[str, list[float]]) -> None:
    print(f"{'':<34}{'samples/s':>12}{'range':>22}")
    for name, each in speeds.items():
        extent = f"{min(each):,.0f}-{max(each):,.0f}"
        print(f"{name:<34}{median(each):>12,.0f}{extent:>22}")
    for name, problem in MISSING.items():
        print(f"{name:<34}not measured: {problem}")


def print_ratios(ratios: dict[str, dict[str, float]], rivals: Sequence[str]) -> None:
    """Print how many times faster ours is: a row for each rival, a column for each of our ways to read."""
    print(f"{'':<28}" + "".join(f"{ours:>26}" for ours in OURS))
    for rival in (*rivals, BOUND):
        row = [ratios[f"{ours} over {rival}"] for ours in OURS]
        cells = [f"{ratio['median']:.1f}x ({ratio['min']:.1f}-{ratio['max']:.1f})" for ratio in row]
        print(f"{rival:<28}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
