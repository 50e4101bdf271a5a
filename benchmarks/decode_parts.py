"""Measure the processor time that a build's checks and bookkeeping add to Pillow's open, load and resize of a JPEG.

Three programs are measured: Pillow alone, which drops the pixels; Pillow in a plain script, which copies them into a
batch's array; and `precompute build`, from a file's bytes to that array, with and without previews. The build also
counts the file's parts, hashes its bytes, turns and fits the image, and hands the work to a thread and back.

A difference of 5 % is smaller than the changes in a shared processor's speed from second to second. So the programs
take turns every few images, and in each turn only the fastest round counts.
"""

import ctypes
import io
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from benchmarks.decode import jpegs_of
from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds
from cache_store.errors import ConfigError
from cache_store.format.array import ArraySpec, ImageRecipe
from cache_store.format.schema import Recipe, Spec
from cache_store.program.running import run_program, usable_cores
from precompute.encode.batches import BATCHES_AHEAD, Batch, Decoders, decoded_batches
from precompute.images.decode import ImageConfig, content_sha256
from precompute.images.fit import RESAMPLING
from precompute.images.parts import refuse_costly
from tests.make_cache import make_array, make_encoder

# Axes: N images of a batch, Y X pixels, 3 RGB.

CHANNELS, VAE_FACTOR = 16, 8
PILLOW, SCRIPT, BUILD, WITH_PREVIEWS = "Pillow alone", "Pillow into arrays", "a build", "with previews"
COUNTED, HASHED = "counting parts", "SHA-256"
PACKAGES = ("pillow", "numpy", "encode-once")
TURN_BATCHES = BATCHES_AHEAD + 1
"""Batches of images in each turn: as many as a build decodes at once."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20
"""The largest value that glibc accepts for M_MMAP_THRESHOLD."""

Works = Mapping[str, Callable[[], object]]


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.decode_parts", run, argv)


def run(argv: Sequence[str]) -> int:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", count=196, batch_size=8, repeats=30)
    options = parser.parse_args(argv)
    if options.height % VAE_FACTOR or options.width % VAE_FACTOR:
        raise ConfigError(f"--height and --width must be multiples of {VAE_FACTOR}, as a VAE needs")
    recipe = ImageConfig(height=options.height, width=options.width).recipe
    files = jpegs_of(options)
    keep_freed_memory()
    us_an_image = {
        f"threads: {threads}": fastest_us(files, recipe, options, threads) for threads in sorted({1, usable_cores()})
    }
    added = {threads: shares(us) for threads, us in us_an_image.items()}
    for threads, us in us_an_image.items():
        print(f"{threads:<30}{'us an image':>12}")
        for name, figure in us.items():
            print(f"  {name:<28}{figure:>12}")
        for name, share in added[threads].items():
            print(f"  {name:<28}{share:>12.1%} of Pillow's")
    print_record("decode_parts", PACKAGES, settings=vars(options), us_an_image=us_an_image, added=added)
    return 0


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: unlike a long build, turns as short as these would take new memory again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def shares(us: Mapping[str, float]) -> dict[str, float]:
    """Return the extra time of a build over a plain script, as a share of Pillow's time."""
    builds = {"checks and bookkeeping": BUILD, "the same, and previews": WITH_PREVIEWS}
    return {name: round((us[build] - us[SCRIPT]) / us[PILLOW], 4) for name, build in builds.items()}


def fastest_us(files: Sequence[bytes], recipe: ImageRecipe, options: Namespace, threads: int) -> dict[str, float]:
    """Return processor microseconds per image of every program, from the fastest round of each turn."""
    size, fastest = TURN_BATCHES * options.batch_size, defaultdict[str, float](float)
    with Decoders(threads) as pool:
        for start in range(0, len(files), size):
            works = Turn(files[start : start + size], recipe, options.batch_size, pool).works()
            for name, rounds in interleaved_seconds(works, options.repeats, time.process_time).items():
                fastest[name] += min(rounds)
    return {name: round(seconds * 1e6 / len(files), 1) for name, seconds in fastest.items()}


class Turn:
    """The work of every program on the same few files."""

    def __init__(self, files: Sequence[bytes], recipe: ImageRecipe, batch_size: int, pool: Decoders) -> None:
        self._files, self._recipe, self._batch_size, self._pool = files, recipe, batch_size, pool
        shape = CHANNELS, recipe.height // VAE_FACTOR, recipe.width // VAE_FACTOR
        array = make_array(shape, "float16", "none", make_encoder(batch_size, [0.0] * CHANNELS, [1.0] * CHANNELS))
        self._array = msgspec.structs.replace(array, image=recipe)

    def works(self) -> Works:
        kinds = self._array, msgspec.structs.replace(self._array, has_preview=False)
        with_previews, without = (spec_of(kind, len(self._files)) for kind in kinds)
        return {
            PILLOW: partial(self._in_shares, self._by_pillow),
            SCRIPT: partial(self._in_shares, self._into_arrays),
            BUILD: partial(self._by_a_build, without),
            WITH_PREVIEWS: partial(self._by_a_build, with_previews),
            COUNTED: partial(for_each, partial(refuse_costly, max_pixels=self._recipe.max_pixels), self._files),
            HASHED: partial(for_each, content_sha256, self._files),
        }

    def _by_a_build(self, spec: Spec) -> None:
        for batch in decoded_batches(self._batches(spec), self._pool, InMemory(self._files)):
            batch.wait()

    def _batches(self, spec: Spec) -> Iterator[Batch]:
        planned = pa.table({"uri": [str(number) for number in range(len(self._files))]})
        for start in range(0, len(self._files), self._batch_size):
            yield Batch(spec, planned, 0, start)

    def _in_shares(self, work: Callable[[Sequence[bytes]], None]) -> None:
        threads = self._pool.num_threads
        for _ in self._pool.map(work, [self._files[first::threads] for first in range(threads)]):
            pass

    def _by_pillow(self, files: Sequence[bytes]) -> None:
        for data in files:
            self._resized(data)

    def _into_arrays(self, files: Sequence[bytes]) -> None:
        for start in range(0, len(files), self._batch_size):
            batch = files[start : start + self._batch_size]
            pixels_NYX3 = np.empty((len(batch), self._recipe.height, self._recipe.width, 3), np.uint8)
            for pixels_YX3, data in zip(pixels_NYX3, batch, strict=True):
                pixels_YX3[:] = np.asarray(self._resized(data))

    def _resized(self, data: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(data))
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return rgb.resize((self._recipe.width, self._recipe.height), RESAMPLING[self._recipe.resample])


class InMemory:
    """A source of files in memory, named by their numbers."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self._files = files

    def fingerprint(self, name: str, /) -> str:
        return name

    def read(self, name: str, /) -> bytes:
        return self._files[int(name)]


def spec_of(array: ArraySpec, rows: int) -> Spec:
    recipe = Recipe(format_version=1, store_format="zarr", samples_per_shard=rows, array=array)
    return recipe.spec(rows, plan_digest="0" * 64)


def for_each(work: Callable[[Any], object], inputs: Iterable[Any]) -> None:
    for each in inputs:
        work(each)


if __name__ == "__main__":
    sys.exit(main())
