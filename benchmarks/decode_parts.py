"""Processor time that a build adds to Pillow's bare open, load and resize of a JPEG: in all, and part by part.

The whole is what `precompute build` does from a file's bytes to a batch that is ready for the encoder: the file's parts
are counted and its bytes hashed, the image is decoded, turned, fitted and put into the batch, a preview made of it, and
all that handed to a thread and back. Pillow alone gives images that nobody looks at; beside it stands what any script
has to do then, to put their pixels into an array of a batch. In several threads, both are, too.

Each part is measured by itself, too. The rest is handing over, and that parts take longer after a decoder, which leaves
nothing of them in the processor's caches.
"""

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from benchmarks.decode import jpegs_of
from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, speedups, spread
from cache_store.cores import usable_cores
from cache_store.errors import ConfigError
from cache_store.format.schema import ArraySpec, ImageRecipe, Recipe, Spec
from cache_store.program.run_program import run_program
from precompute.encode.batches import Batch, Decoders, decoded_batches
from precompute.images.decode import ImageConfig, content_sha256, decode_image
from precompute.images.fit import RESAMPLING, fit_image
from precompute.images.parts import refuse_costly
from tests.make_cache import make_array, make_encoder

# Axes: N images of a batch, Y X pixels, 3 RGB.

CHANNELS, VAE_FACTOR = 16, 8
BARE, SCRIPT, WHOLE, NO_PREVIEWS = "Pillow alone", "Pillow into arrays", "the whole", "without previews"
FITTED, COUNTED, HASHED, PLACED, SHOWN = "fitted", "count parts", "SHA-256", "into the batch", "and the preview"
PACKAGES = ("pillow", "numpy", "encode-once")

Works = Mapping[str, Callable[[], object]]
Rounds = dict[str, list[float]]
"""Microseconds an image in every round, by work."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.decode_parts", run, argv)


def run(argv: Sequence[str]) -> int:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", count=196, batch_size=8, repeats=15)
    options = parser.parse_args(argv)
    if options.height % VAE_FACTOR or options.width % VAE_FACTOR:
        raise ConfigError(f"--height and --width must be multiples of {VAE_FACTOR}, as of a VAE's images")
    bench = Bench(jpegs_of(options), ImageConfig(height=options.height, width=options.width).recipe, options.batch_size)
    whole = {threads: bench.measure(bench.whole(threads), options.repeats) for threads in sorted({1, usable_cores()})}
    us_an_image = added(whole[1], bench.measure(bench.parts(), options.repeats))
    ratios = {
        f"{name} over {theirs}, threads: {threads}": spread(speedups(rounds[name], rounds[theirs]))
        for theirs in (BARE, SCRIPT)
        for name in (WHOLE, NO_PREVIEWS)
        for threads, rounds in whole.items()
    }
    for name, microseconds in us_an_image.items():
        print(f"{name:<56}{microseconds:8.1f} us an image")
    for name, ratio in ratios.items():
        print(f"{name:<56}{ratio}")
    print_record("decode_parts", PACKAGES, settings=vars(options), us_an_image=us_an_image, ratios=ratios)
    return 0


def added(whole: Rounds, parts: Rounds) -> dict[str, float]:
    """Microseconds an image, medians: Pillow's, what each part adds to them, and what the whole does."""
    us = {name: median(rounds) for name, rounds in parts.items()}
    each = {
        COUNTED: us[COUNTED],
        "turn and fit": us[FITTED] - us[BARE] - us[COUNTED],
        HASHED: us[HASHED],
        PLACED: us[PLACED],
        "preview": us[SHOWN] - us[PLACED],
    }
    all_us = median(whole[WHOLE]) - median(whole[BARE])
    figures = (
        {name: median(whole[name]) for name in (BARE, SCRIPT)}
        | each
        | {"the rest": all_us - sum(each.values()), "added in all": all_us}
    )
    return {name: round(microseconds, 1) for name, microseconds in figures.items()}


class Bench:
    """Ways to decode the same files, and the parts of that; each work does all files."""

    def __init__(self, files: Sequence[bytes], recipe: ImageRecipe, batch_size: int) -> None:
        self._files, self._recipe, self._batch_size = files, recipe, batch_size
        shape = CHANNELS, recipe.height // VAE_FACTOR, recipe.width // VAE_FACTOR
        array = make_array(shape, "float16", "none", make_encoder(batch_size, [0.0] * CHANNELS, [1.0] * CHANNELS))
        array = msgspec.structs.replace(array, image=recipe)
        kinds = {WHOLE: array, NO_PREVIEWS: msgspec.structs.replace(array, has_preview=False)}
        self._specs = {name: spec_of(kind, len(files)) for name, kind in kinds.items()}

    def measure(self, works: Works, repeats: int) -> Rounds:
        seconds = interleaved_seconds(works, repeats, time.process_time)
        return {name: [each * 1e6 / len(self._files) for each in rounds] for name, rounds in seconds.items()}

    def whole(self, threads: int) -> Works:
        works = {name: partial(self._decode, threads, spec) for name, spec in self._specs.items()}
        by_pillow = {BARE: self._by_pillow, SCRIPT: self._into_arrays}
        return {name: partial(self._in_shares, threads, work) for name, work in by_pillow.items()} | works

    def parts(self) -> Works:
        fitted = [self._fit(data) for data in self._files]
        placed, shown = (next(self._batches(self._specs[name])).put for name in (NO_PREVIEWS, WHOLE))
        return {
            BARE: partial(self._by_pillow, self._files),
            FITTED: partial(for_each, self._fit, self._files),
            COUNTED: partial(for_each, partial(refuse_costly, max_pixels=self._recipe.max_pixels), self._files),
            HASHED: partial(for_each, content_sha256, self._files),
            PLACED: partial(for_each, partial(placed, 0), fitted),
            SHOWN: partial(for_each, partial(shown, 0), fitted),
        }

    def _decode(self, threads: int, spec: Spec) -> None:
        with Decoders(threads) as pool:
            for batch in decoded_batches(self._batches(spec), pool, InMemory(self._files)):
                batch.wait()

    def _batches(self, spec: Spec) -> Iterator[Batch]:
        planned = pa.table({"uri": [str(number) for number in range(len(self._files))]})
        for start in range(0, len(self._files), spec.array.encoder.batch_size):
            yield Batch(spec, planned, 0, start)

    def _fit(self, data: bytes) -> Image.Image:
        return fit_image(decode_image(data, self._recipe), self._recipe)

    def _in_shares(self, threads: int, work: Callable[[Sequence[bytes]], None]) -> None:
        shares = [self._files[first::threads] for first in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, shares):
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
    """Files by their numbers."""

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
