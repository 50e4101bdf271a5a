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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import webdataset
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from benchmarks.harness import parser_with, program, rates, ratios, report, take_turns
from cache_store import open_cache
from cache_store.cache.gather import copy_rows, move_rows
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.format.layout import ZARR_ARRAY
from tests.make_cache import make_cache

# Axes: N samples, C channels, H W latent cells.

Latents = NDArray[np.float16]
Read = Callable[[Any], Latents]
"""Reads sample numbers [N], or a slice of them, as a batch [N, C, H, W]."""
Order = Callable[[np.random.Generator], Iterator[Any]]
Batches = Callable[[np.random.Generator], Iterable[Latents]]

IN_ORDER = ", in order"
SHAPE = (16, 28, 28)
SHUFFLE_BUFFER = 1_000
"""webdataset's own default order of magnitude."""
READERS = ("zarr-python", "zarr-python with zarrs", "TensorStore")
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
OURS = [name for name in PASSES if name.startswith("cache.read")]
CODECS: tuple[CodecName, CodecName] = ("none", "zstd")
PACKAGES = ("numpy", "torch", "webdataset", "datasets", "zarr", "zarrs", "tensorstore", "awscrt", "encode-once")


def run(argv: Sequence[str]) -> int:
    names = ("samples_per_shard", "repeats", "folder")
    options = parser_with(__doc__, *names, samples=20_000, batch_size=256).parse_args(argv)
    if options.batch_size > options.samples:
        raise ConfigError(f"--batch-size must be at most {options.samples}, the number of samples")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="loader-", dir=options.folder) as name:
        folder = Path(name)
        noise = np.random.default_rng(0).standard_normal((options.samples, *SHAPE), np.float32).astype(np.float16)
        loaders = prepare(folder, noise, options.batch_size, options.samples_per_shard)
        shards = {codec: (folder / codec / ZARR_ARRAY).glob("*/c/*/0/0/0") for codec in CODECS}
        disk_bytes = {codec: sum(path.stat().st_size for path in each) for codec, each in shards.items()}
        count = options.samples // options.batch_size * options.batch_size
        works = {name: partial(run_passes, each, count, options, PASSES[name]) for name, each in loaders.items()}
        seconds = take_turns(works, options.repeats)
    speeds = {name: rates(count * PASSES[name], each) for name, each in seconds.items()}
    over = {
        f"{ours} over {name}": ratios(speeds[ours], speeds[name])
        for ours in OURS
        for name in sorted(speeds.keys() - OURS)
        if name.endswith(IN_ORDER) == ours.endswith(IN_ORDER)
    }
    copies = "row by row" if copy_rows is move_rows else "in C"
    report(options, PACKAGES, "samples_per_s", speeds, over, disk_bytes=disk_bytes, copies=copies)
    return 0


def prepare(folder: Path, latents: Latents, batch_size: int, samples_per_shard: int) -> dict[str, Batches]:
    """Write every format; return a loader for each whose package is installed."""
    plain, packed = (
        open_cache(make_cache(folder / codec, latents, codec=codec, samples_per_shard=samples_per_shard))
        for codec in CODECS
    )
    order = partial(shuffled, len(latents), batch_size)
    slices = partial(row_order, len(latents), batch_size)
    buffered = partial(buffered_loader, batch_size)
    readers = zarr_readers(folder / CODECS[0] / ZARR_ARRAY / plain.spec.names[0])
    return {
        "webdataset": webdataset_loader(folder / "tars", latents, batch_size),
        "one .pt an image": torch_loader(folder / "pt", latents, order),
        **datasets_loaders(folder, latents, order),
        **{name: by_batch(order, read) for name, read in readers.items()},
        "gather in memory": buffered(order, partial(np.take, latents, axis=0, mode="clip")),  # others copy once more
        "cache.read checked": buffered(order, plain.read),
        "cache.read unchecked": buffered(order, partial(plain.read, check=False)),
        "cache.read zstd checked": buffered(order, packed.read),
        "cache.read zstd unchecked": buffered(order, partial(packed.read, check=False)),
        **{f"{name}{IN_ORDER}": by_batch(slices, read) for name, read in readers.items()},
        f"cache.read checked{IN_ORDER}": buffered(lambda rng: (np.r_[each] for each in slices(rng)), plain.read),
    }


def run_passes(loader: Batches, count: int, options: argparse.Namespace, number: int) -> None:
    """Do `number` passes over all whole batches, and check that every batch is what a training step would take."""
    for seed in range(number):
        seen = 0
        for batch in loader(np.random.default_rng(seed)):
            assert batch.shape == (options.batch_size, *SHAPE), batch.shape
            seen += len(batch)
        assert seen == count, (seen, count)


def shuffled(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    order = rng.permutation(count)
    return (order[each] for each in row_order(count, batch_size, rng))


def row_order(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[slice]:
    return (slice(start, start + batch_size) for start in range(0, count - batch_size + 1, batch_size))


def by_batch(order: Order, read: Read) -> Batches:
    return lambda rng: map(read, order(rng))


def buffered_loader(batch_size: int, order: Order, read: Callable[..., Latents]) -> Batches:
    """Return a loader that reads every batch into one buffer, given as `out`."""

    def batches(rng: np.random.Generator) -> Iterator[Latents]:
        out = np.empty((batch_size, *SHAPE), np.float16)
        return (read(numbers, out=out) for numbers in order(rng))

    return batches


def zarr_readers(array: Path) -> dict[str, Read]:
    """Return Zarr's own readers of the array, as documented, as far as installed; a broken package is an error.

    zarr-python is given sorted numbers, which takes half as long as unsorted ones. zarrs is a codec pipeline of it, in
    Rust. TensorStore has its own threads, and does not check whether metadata and shards have changed.
    """
    readers = dict[str, Read]()
    if find_spec("zarr"):
        readers["zarr-python"] = by_zarr_python(array)
    if find_spec("zarrs"):
        import zarr

        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            readers["zarr-python with zarrs"] = by_zarr_python(array)
    if find_spec("tensorstore"):
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
        opened = tensorstore.open(spec, read=True, recheck_cached_metadata="open", recheck_cached_data="open").result()
        readers["TensorStore"] = lambda numbers: np.asarray(opened[numbers].read().result())
    return readers


def by_zarr_python(array: Path) -> Read:
    import zarr

    stored: Any = zarr.open_array(str(array), mode="r")
    return lambda numbers: stored[numbers] if isinstance(numbers, slice) else stored.oindex[np.sort(numbers)]


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


def as_batch(values: Any) -> Latents:
    """View the bytes of whole samples as a batch, without a copy."""
    return np.frombuffer(values, np.float16).reshape(-1, *SHAPE)


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


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
