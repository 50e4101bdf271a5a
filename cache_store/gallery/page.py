"""The page itself. Ids, uris and captions are untrusted text: Jinja2 escapes every value that enters it."""

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
"""Of an id, a uri, a caption or a reason; a data set may hold a novel in any of them."""

FLAT = 2
"""Pictures this many times as long one way as the other need cards of their own layout."""


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """What a gallery shows, before it is laid out."""

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
        """Why samples have no preview, and what is shown all the same."""
        array = self.cache.spec.array
        if array.has_preview:
            return None
        if array.text is not None:
            return "the cache was made of texts; shown are texts, distributions, and unusual and rejected rows"
        return (
            f"nothing maps [{array.named_shape}] to colours; shown are source images, distributions, and unusual and "
            "rejected rows"
        )

    @property
    def is_decoded(self) -> bool:
        return any(exhibit.decoded is not None for exhibit in self.random)

    @staticmethod
    def mean_psnr(exhibits: Sequence[Exhibit]) -> float | None:
        """Over the rows whose source could be compared."""
        values = [exhibit.psnr for exhibit in exhibits if exhibit.psnr is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What was written and what it shows."""

    page: Path
    sheets: tuple[Path, ...]
    content: PageContent


def render(content: PageContent) -> str:
    """The page as one HTML text that refers to nothing outside itself."""
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
    """As wide as the pictures above it, unless it is shorter than a line."""
    columns = strip_columns(*array.shape[1:])
    return f"{100 * min(array.num_features, columns) / columns:.4g}%"


def layout(image: ImageRecipe) -> str:
    """How cards are laid out: wide pictures lie one under the other, tall ones stand in narrow cards."""
    if image.width >= FLAT * image.height:
        return "wide"
    return "tall" if image.height >= FLAT * image.width else "square"


def page_template(package: str, name: str) -> Template:
    """The template of a page, in which every value is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(short=short, decibels=decibels, jpeg=jpeg_uri, png=png_uri)
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


def short(text: str) -> str:
    """On one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"
