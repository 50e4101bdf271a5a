"""Render the page. Ids, uris and captions are untrusted, so Jinja2 escapes every value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from cache_store.cache.info import array_lines, spec_lines
from cache_store.cache.reader import Cache
from cache_store.format.schema import ArraySpec, CommitRecord, ImageRecipe
from cache_store.gallery import plots
from cache_store.gallery.exhibits import Exhibit
from cache_store.gallery.pictures import jpeg_uri, png_uri, strip_columns
from cache_store.gallery.unusual import LatentSurvey, Unusual

SHOWN_CHARACTERS = 300
"""Characters shown of an id, uri, caption or reason, which may be very long."""

FLAT = 2
"""Pictures whose sides differ by this factor or more get their own card layout."""


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """The content of a gallery, before it is laid out."""

    cache: Cache
    seed: int
    survey: LatentSurvey
    random: list[Exhibit]
    unusual: list[tuple[Exhibit, Unusual]]
    rejected: list[Exhibit]
    records: list[CommitRecord]
    source_problem: str | None

    @property
    def no_pictures(self) -> str | None:
        """Why samples have no preview and what the page shows instead; None if they have one."""
        array = self.cache.spec.array
        if array.has_preview:
            return None
        if array.text is not None:
            return "samples are texts, not images; the page shows texts, distributions, and unusual and rejected rows"
        return (
            f"samples of [{array.named_shape}] have no preview; the page shows source images, distributions, and "
            "unusual and rejected rows"
        )

    @property
    def is_decoded(self) -> bool:
        return any(exhibit.decoded is not None for exhibit in self.random)

    @staticmethod
    def mean_psnr(exhibits: Sequence[Exhibit]) -> float | None:
        """Average the PSNR over rows whose source could be compared; None if there are none."""
        values = [exhibit.psnr for exhibit in exhibits if exhibit.psnr is not None]
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
    summary, array = seal.array, spec.array
    return page_template("cache_store.gallery", "page.html").render(
        content=content,
        name=content.cache.name,
        seal=seal,
        spec=spec,
        summary=summary,
        array=array,
        layout=layout(array.image) if array.image else "tall",
        features=f"{array.feature_axis}s".capitalize(),
        facts=[*spec_lines(spec), *array_lines(array)],
        reasons=sorted(seal.reasons.items(), key=lambda reason: (-reason[1], reason[0])),
        histograms=plots.plot(partial(plots.histograms, content.survey, summary)),
        throughput=plots.plot(partial(plots.throughput, content.records)) if content.records else None,
        strip_scale=plots.plot(plots.strip_scale) if array.has_preview else None,
        error_scale=plots.plot(plots.error_scale) if content.is_decoded else None,
        strip_width=strip_width(array) if array.has_preview else None,
    )


def strip_width(array: ArraySpec) -> str:
    """Return the strip's width in percent: that of the pictures above it, or less if its line is not full."""
    columns = strip_columns(*array.shape[1:])
    return f"{100 * min(array.num_features, columns) / columns:.4g}%"


def layout(image: ImageRecipe) -> str:
    """Choose the layout of cards: wide pictures are stacked, tall ones get narrow cards."""
    if image.width >= FLAT * image.height:
        return "wide"
    return "tall" if image.height >= FLAT * image.width else "square"


def page_template(package: str, name: str) -> Template:
    """Make a page's template, which escapes every value."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(short=short, decibels=decibels, jpeg=jpeg_uri, png=png_uri)
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


def short(text: str) -> str:
    """Put text on one line and cut it after `SHOWN_CHARACTERS`."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"
