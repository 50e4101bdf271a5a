"""Show a cache on one page without references to other files: rows, rejected rows, histograms.

Ids, uris and captions are untrusted, so Jinja2 escapes every value.
"""

# Axes: F features, B bins.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from cache_store.cache.entry_points import find_source_images
from cache_store.cache.reader import Cache, open_cache
from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.format.array import ArraySpec
from cache_store.gallery.pictures import jpeg_uri, png_uri
from cache_store.gallery.rows import Decode, Exhibit, Showcase, batches, draw_rejects, numbers_to_count, random_numbers
from cache_store.options import GalleryConfig
from cache_store.program.output_file import refuse_output
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import write_file
from cache_store.storage.store import Address

MOST_FEATURES = 96
"""Most features shown; no VAE has more today. If there are more, evenly spaced ones are shown."""
BINS = 80
HISTOGRAM_SPAN = 4.0
"""Standard deviations on either side of a feature's mean that the histograms show."""
READ_BYTES = 64 * 2**20

SHOWN_CHARACTERS = 300
"""Characters shown of an id, uri, caption or reason, which may be very long."""


@dataclass(frozen=True)
class Histogram:
    """How often values of one feature occur, on the scale of all."""

    feature: int
    mean: float
    std: float
    count_B: np.ndarray
    place: float
    """Place of the mean on the scale, in [0, BINS]."""

    @property
    def outline(self) -> str:
        """The bars as the path of an SVG of BINS x 1."""
        height_B = 1 - self.count_B / max(1, self.count_B.max())
        return "M0 1" + "".join(f"V{height:.3f}h1" for height in height_B) + "V1Z"


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The page that was written, and its content."""

    page: Path
    cache: Cache
    config: GalleryConfig
    shown: Sequence[Exhibit]
    rejected: Sequence[Exhibit]
    counted: int
    """Number of samples whose values the histograms count."""
    histograms: Sequence[Histogram]
    ends: tuple[float, float]
    """The smallest and the largest value of the histograms' scale."""
    source_problem: str | None

    @property
    def array(self) -> ArraySpec:
        return self.cache.arrays[0]

    @property
    def kind(self) -> str:
        return "random" if self.config.where is None else "chosen"

    @property
    def no_pictures(self) -> str | None:
        if self.cache.seal.array.preview is not None:
            return None
        return (
            f"samples of [{self.array.named_axes}] have no preview here; the page shows source {self.array.made_of}s, "
            "distributions and rejected rows"
        )

    @property
    def mean_psnr(self) -> float | None:
        values = [exhibit.psnr for exhibit in self.shown if exhibit.psnr is not None]
        return sum(values) / len(values) if values else None


def make_gallery(address: Address, config: GalleryConfig, decode: Decode | None = None) -> Gallery:
    """Write the page of a sealed cache; `decode` adds decoded images and their PSNR."""
    cache = open_cache(address)
    refuse_output("--output", config.page, cache.root)
    counted, numbers = numbers_to_count(cache, config.seed), numbers_to_show(cache, config)
    read_image, source_problem = None, None
    if cache.spec.array.image:
        try:
            read_image = find_source_images(cache.store)
        except EncodeOnceError as error:
            source_problem = str(error)
    showcase = Showcase(cache=cache, read_image=read_image, source_problem=source_problem, decode=decode)
    exhibits = showcase.cached(numbers)
    histograms, ends = count_values(cache, counted)
    gallery = Gallery(
        page=config.page,
        cache=cache,
        config=config,
        shown=[exhibits[number] for number in numbers],
        rejected=showcase.rejected(draw_rejects(cache, config.rows, config.seed)),
        counted=len(counted),
        histograms=histograms,
        ends=ends,
        source_problem=source_problem,
    )
    write_file(config.page, render(gallery).encode())
    return gallery


def print_gallery(gallery: Gallery) -> None:
    print(f"{len(gallery.shown):,} {gallery.kind} rows, {len(gallery.rejected):,} rejected rows")
    if gallery.source_problem:
        print(f"without source {gallery.array.made_of}s: {gallery.source_problem}")
    if gallery.no_pictures:
        print(f"without pictures of samples: {gallery.no_pictures}")
    if gallery.mean_psnr is not None:
        print(f"mean PSNR of the {gallery.kind} rows, decoded: {gallery.mean_psnr:.1f} dB")
    print(f"wrote {gallery.page}, {gallery.page.stat().st_size / 1e3:,.0f} KB, open it in any browser")


def numbers_to_show(cache: Cache, config: GalleryConfig) -> list[int]:
    if config.where is None:
        drawn: list[int] = random_numbers(cache, config.rows, config.seed).tolist()
        return drawn
    numbers: list[int] = cache.where(config.where)[: config.rows].tolist()
    if not numbers:
        raise ConfigError(f"--where: {config.where} is true for no cached sample; rejected rows are shown anyway")
    return numbers


def count_values(cache: Cache, numbers: np.ndarray) -> tuple[list[Histogram], tuple[float, float]]:
    """Count the values of these samples by feature; also return the ends of the scale."""
    array, summary = cache.spec.array, cache.seal.array
    shown = min(array.features, MOST_FEATURES)
    features, axis = np.arange(shown) * array.features // shown, array.feature_place + 1
    mean, std, low, high = (
        np.array(each)[features] for each in (summary.mean, summary.std, summary.minimum, summary.maximum)
    )
    first = float(max((mean - HISTOGRAM_SPAN * std).min(), low.min()))
    last = float(min((mean + HISTOGRAM_SPAN * std).max(), high.max()))
    if last <= first:
        first, last = first - 0.5, first + 0.5
    count_FB = np.zeros((shown, BINS), np.int64)
    with ProgressBar("histograms", len(numbers), "sample") as bar:
        for batch in batches(cache, numbers, lambda sized: READ_BYTES // (4 * sized.sample_bytes)):
            stored = cache.read(batch).take(features, axis).astype(np.float32)
            for place, values in enumerate(np.moveaxis(stored, axis, 0)):
                count_FB[place] += np.histogram(values, BINS, (first, last))[0]
            bar.update(len(batch))
    places = (mean - first) / (last - first) * BINS
    return [*map(Histogram, features.tolist(), mean.tolist(), std.tolist(), count_FB, places.tolist())], (first, last)


def render(gallery: Gallery) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(short=shorten_text, decibels=decibels, jpeg=jpeg_uri, png=png_uri)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    seal, spec = gallery.cache.seal, gallery.cache.spec
    return template.render(
        gallery=gallery,
        config=gallery.config,
        array=gallery.array,
        arrays=gallery.cache.arrays,
        seal=seal,
        spec=spec,
        sizes=[(array, [*rows]) for array, rows in groupby(gallery.shown, lambda exhibit: exhibit.array)],
        features=f"{gallery.array.feature_axis}s".capitalize(),
        reasons=sorted(seal.reasons.items(), key=lambda reason: (-reason[1], reason[0])),
        bins=BINS,
    )


def shorten_text(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"
