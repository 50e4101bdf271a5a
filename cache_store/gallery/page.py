"""Render the page and its plots. Ids, uris and captions are untrusted, so Jinja2 escapes every value.

matplotlib draws each plot as SVG, once for a light and once for a dark page, without pyplot, which would keep figures
in memory.
"""

import io
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cache_store.cache.info import array_lines, spec_lines
from cache_store.cache.reader import Cache
from cache_store.format.array import ArraySpec
from cache_store.format.schema import ArraySummary, CommitRecord
from cache_store.gallery.exhibits import Exhibit
from cache_store.gallery.histograms import Histograms
from cache_store.gallery.pictures import (
    ERROR_COLOURS,
    ERROR_SPAN,
    STRIP_COLOURS,
    STRIP_SPAN,
    data_uri,
    jpeg_uri,
    png_uri,
    strip_columns,
)

# Axes: F features, B bins.


HISTOGRAM_COLUMNS = 8
SHOWN_DEVICES = 6
DEVICE_COLOURS = "tab10"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Colours of one colour scheme of the page."""

    text: str
    quiet: str
    fill: str
    mark: str


LIGHT = Scheme(text="#1f2328", quiet="#8b949e", fill="#6a9bd8", mark="#b3432b")
DARK = Scheme(text="#e6e8eb", quiet="#6e7681", fill="#5b8ac6", mark="#f0936f")


@dataclass(frozen=True)
class Plot:
    """Data URIs of the same plot in both schemes."""

    light: str
    dark: str


def plot(draw: Callable[[Scheme], Figure]) -> Plot:
    """Draw a plot for the light page and recolour it for the dark one: drawing takes most of a page's time."""
    light = dark = drawn_svg(draw, LIGHT)
    for name, colour in vars(LIGHT).items():
        dark = dark.replace(colour, getattr(DARK, name))
    return Plot(*(data_uri("image/svg+xml", each.encode()) for each in (light, dark)))


def drawn_svg(draw: Callable[[Scheme], Figure], scheme: Scheme) -> str:
    """Draw as SVG without date or random ids, so that equal figures give equal bytes."""
    settings: dict[Any, Any] = {
        "svg.hashsalt": "encode-once",
        "font.size": 9,
        "text.color": scheme.text,
        "axes.labelcolor": scheme.text,
        "axes.edgecolor": scheme.quiet,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": scheme.quiet,
        "ytick.color": scheme.quiet,
        "xtick.labelcolor": scheme.text,
        "ytick.labelcolor": scheme.text,
    }
    stream = io.BytesIO()
    with matplotlib.rc_context(settings):
        draw(scheme).savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue().decode()


def histograms(counted: Histograms, summary: ArraySummary, scheme: Scheme) -> Figure:
    """Draw a histogram per feature, all on one horizontal scale; the mark is the mean over the whole cache."""
    features = counted.feature_F.tolist()
    columns = min(len(features), HISTOGRAM_COLUMNS)
    lines = math.ceil(len(features) / columns)
    figure = Figure(figsize=(1.6 * columns, 0.25 + 1.25 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, squeeze=False)
    for place, axes in enumerate(panels.flat):
        if place < len(features):
            histogram(axes, counted.edge_B, counted.count_FB[place], scheme)
            mean, std = summary.mean[features[place]], summary.std[features[place]]
            axes.axvline(mean, color=scheme.mark, linewidth=1)
            axes.set_title(f"{features[place]}:  {mean:.2f} ± {std:.2f}".replace("-", "\N{MINUS SIGN}"), fontsize=8.5)
        else:
            axes.set_visible(False)
    return figure


def histogram(axes: Axes, edge_B: np.ndarray, count_B: np.ndarray, scheme: Scheme) -> None:
    axes.stairs(count_B, edge_B, fill=True, color=scheme.fill)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(labelsize=8)


def throughput(records: Sequence[CommitRecord], scheme: Scheme) -> Figure:
    """Plot images per second of each shard, coloured by where it was built; the line is the median."""
    figure = Figure(figsize=(12.8, 2.7), layout="constrained")
    axes = figure.subplots()
    for colour, (place, built) in enumerate(by_place(records).items()):
        shards, rates = [record.content.shard for record in built], [record.run.images_per_s for record in built]
        axes.plot(
            shards,
            rates,
            linestyle="none",
            marker="o",
            markersize=5 if len(records) < 200 else 2.5,
            color=matplotlib.colormaps[DEVICE_COLOURS](colour),
            label=place,
        )
    median = statistics.median(record.run.images_per_s for record in records)
    axes.axhline(median, color=scheme.mark, linewidth=1, zorder=0, label=f"median {median:,.1f}")
    first, last = records[0].content.shard, records[-1].content.shard
    margin = 0.5 + 0.01 * (last - first)
    axes.set(xlabel="shard", ylabel="images/s, a worker", xlim=(first - margin, last + margin), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda shard, _: f"{shard:,.0f}"))
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def by_place(records: Sequence[CommitRecord]) -> dict[str, list[CommitRecord]]:
    """Group records by device and host, most frequent first; beyond a few, the rest together."""
    places: dict[str, list[CommitRecord]] = {}
    for record in records:
        places.setdefault(f"{record.run.device} at {record.run.host}", []).append(record)
    ordered = sorted(places, key=lambda place: (-len(places[place]), place))
    shown = {legend_label(place): places[place] for place in ordered[:SHOWN_DEVICES]}
    rest = [record for place in ordered[SHOWN_DEVICES:] for record in places[place]]
    return {**shown, f"{len(ordered) - SHOWN_DEVICES} others": rest} if rest else shown


def legend_label(text: str) -> str:
    """Shorten a label and drop leading underscores, because matplotlib hides labels that begin with one."""
    return text.lstrip("_")[:40] or "unnamed"


def strip_scale(scheme: Scheme) -> Figure:
    label = "standard deviations from the channel's mean over the cache"
    return colour_scale(STRIP_COLOURS, Normalize(-STRIP_SPAN, STRIP_SPAN), label)


def error_scale(scheme: Scheme) -> Figure:
    return colour_scale(ERROR_COLOURS, Normalize(0, ERROR_SPAN), "mean difference over R, G, B, in levels of 255")


def colour_scale(colours: str, scale: Normalize, label: str) -> Figure:
    figure = Figure(figsize=(3.6, 0.62), layout="constrained")
    bar = figure.colorbar(ScalarMappable(scale, colours), cax=figure.subplots(), orientation="horizontal")
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


SHOWN_CHARACTERS = 300
"""Characters shown of an id, uri, caption or reason, which may be very long."""

FLAT = 2
"""Pictures whose sides differ by this factor or more get their own card layout."""


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """The content of a gallery, before it is laid out."""

    cache: Cache
    seed: int
    where: str | None
    """The expression that chose the rows that are shown; None if they were drawn."""
    histograms: Histograms
    shown: list[Exhibit]
    """Cached rows."""
    rejected: list[Exhibit]
    records: list[CommitRecord]
    source_problem: str | None

    @property
    def kind(self) -> Literal["random", "chosen"]:
        return "random" if self.where is None else "chosen"

    @property
    def no_pictures(self) -> str | None:
        """Why samples have no preview and what the page shows instead; None if they have one."""
        array = self.cache.spec.array
        if self.cache.seal.array.preview is not None:
            return None
        if array.has_preview:
            return "every shard has withdrawn samples, so no map to colours is left; channels are shown as maps"
        if array.text is not None:
            return "samples are texts, not images; the page shows texts, distributions and rejected rows"
        return (
            f"samples of [{array.named_axes}] have no preview; the page shows source {array.made_of}s, distributions "
            "and rejected rows"
        )

    @property
    def is_decoded(self) -> bool:
        return any(exhibit.decoded is not None for exhibit in self.shown)

    @property
    def shown_by_array(self) -> list[tuple[ArraySpec, list[Exhibit]]]:
        """The cached rows that are shown of each array."""
        return [(array, [*rows]) for array, rows in groupby(self.shown, lambda exhibit: exhibit.array)]

    @property
    def mean_psnr(self) -> float | None:
        """The average PSNR over rows whose source could be compared; None if there are none."""
        values = [exhibit.psnr for exhibit in self.shown if exhibit.psnr is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The files that were written, and their content."""

    page: Path
    sheets: tuple[Path, ...]
    content: PageContent


def render(content: PageContent) -> str:
    """Render the page as one HTML text without references to other files."""
    spec, seal = content.cache.spec, content.cache.seal
    summary, array = seal.array, content.cache.arrays[0]
    return page_template("cache_store.gallery", "page.html").render(
        content=content,
        name=content.cache.name,
        seal=seal,
        spec=spec,
        summary=summary,
        array=array,
        arrays=content.cache.arrays,
        layout=layout(array),
        features=f"{array.feature_axis}s".capitalize(),
        facts=[*spec_lines(spec), *array_lines(spec.array)],
        reasons=sorted(seal.reasons.items(), key=lambda reason: (-reason[1], reason[0])),
        histograms=plot(partial(histograms, content.histograms, summary)),
        throughput=plot(partial(throughput, content.records)) if content.records else None,
        strip_scale=plot(strip_scale) if array.has_preview else None,
        error_scale=plot(error_scale) if content.is_decoded else None,
    )


def strip_width(array: ArraySpec) -> str:
    """Return the strip's width in percent: that of the pictures above it, or less if its line is not full."""
    columns = strip_columns(*array.preview_cells)
    return f"{100 * min(array.features, columns) / columns:.4g}%"


def layout(array: ArraySpec) -> str:
    """Choose the layout of cards: wide pictures are stacked, as a clip's strips are; tall ones get narrow cards."""
    _, height, width = array.size
    if array.made_of == "clip":
        return "wide clip" if width >= height else "wide tall clip"
    if array.text is None and width >= FLAT * height:
        return "wide"
    return "tall" if array.text or height >= FLAT * width else "square"


def page_template(package: str, name: str) -> Template:
    """Make a page's template, which escapes every value; it includes `head.html`, the style of all pages."""
    shared = PackageLoader("cache_store.gallery", "")
    environment = Environment(
        loader=shared, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        short=shorten_text, decibels=decibels, jpeg=jpeg_uri, png=png_uri, strip_width=strip_width
    )
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


def shorten_text(text: str) -> str:
    """Put text on one line and cut it after `SHOWN_CHARACTERS`."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"
