"""Plan images of many sizes, and order their batches.

Three steps, one after the other: read the sizes of a folder's images from their first bytes; list samples of random
sizes and arrange them in the buckets of `ours` at 1024 pixels; find the samples of random batches. Memory is the
greatest resident size of the process so far.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.harness import parser_with, positive_int, print_record, program
from benchmarks.photographs import write_images
from cache_store.format.array import Size
from precompute.config import StoreConfig
from precompute.images.buckets import BucketsConfig
from precompute.images.config import ImageConfig
from precompute.inputs.arrange import BySize
from precompute.inputs.frames import ImageReader
from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source
from precompute.sources.tables import make_table
from trainer.data.buckets import SampleOrder

PACKAGES = ("numpy", "pyarrow", "pillow", "encode-once")
SHARD_ROWS, PART_ROWS, BATCH, BATCHES = 4_096, StoreConfig.rows_per_part, 256, 1_000


class RandomSizes(BySize):
    """Sizes from 400 to 4,000 pixels a side, in place of files."""

    def sizes_of(self, part: pa.Table) -> NDArray[np.int32]:
        sides = np.random.default_rng(0).integers(400, 4_000, (len(part), 2), np.int32)
        return np.insert(sides, 0, 1, axis=1)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    found: dict[str, dict[str, float]] = {}
    rule = BucketsConfig(preset="ours").rule
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name) / "images", options, options.headers)
        source = open_source(SourceConfig(kind="folder", path=f"{name}/images"))
        listed = make_table(source.samples(), (), "the source")
        reader = ImageReader(source, ImageConfig().recipe, threads=2)
        by_size = BySize(rule, SHARD_ROWS, reader, id, "aspect", Size(1, 1024, 1024))
        measure(found, "sizes", options.headers, lambda: by_size.sizes_of(listed))
        arranger = RandomSizes(rule, SHARD_ROWS, reader, id, "aspect", Size(1, 1024, 1024))
    parts = [range(first, min(first + PART_ROWS, options.samples)) for first in range(0, options.samples, PART_ROWS)]
    tables = measure(found, "list", options.samples, lambda: [make_table(samples(part), (), "") for part in parts])
    arrange = lambda: [shard for part in tables for shard in arranger(part)]  # noqa: E731
    shards = measure(found, "arrange", options.samples, arrange)
    counts = Counter[Size]()
    for rows, size in shards:
        counts[size] += len(rows)
    batches = SampleOrder("identity", 0, tuple(counts.values()), BATCH)
    numbers = np.random.default_rng(0).integers(0, 10**6, BATCHES).tolist()
    measure(found, "order", BATCHES, lambda: [batches.at(batches.batch(number)) for number in numbers])
    for step, figures in found.items():
        print(f"{step:<8} {figures['per_s']:>12,.0f}/s {figures['seconds']:>8.1f} s {figures['peak_mib']:>6.0f} MiB")
    print_record(options, PACKAGES, buckets=len(counts), shards=len(shards), results=found)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "mosaic", count=196)
    parser.add_argument("--samples", type=positive_int, default=1_000_000, help="samples that are arranged")
    parser.add_argument("--headers", type=positive_int, default=20_000, help="image files whose sizes are read")
    return parser


def measure(found: dict[str, dict[str, float]], step: str, count: int, work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    found[step] = {"seconds": round(seconds, 2), "per_s": round(count / seconds, 1), "peak_mib": round(peak, 1)}
    return result


def samples(numbers: range) -> Iterator[dict[str, object]]:
    turns = [{"from": "gpt", "value": "a caption of some ordinary words"}]
    for number in numbers:
        name = f"{number:09d}.jpg"
        yield {"id": name, "uri": name, "conversations": turns, "fingerprint": "12:34", "place": None}


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
