"""Choose rows to look at, and collect what the page shows of each; the cost depends on their number alone."""

# Axes: N samples, T frames, S frames shown, Y X pixels, 3 RGB.

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.cache.entry_points import ReadImage
from cache_store.cache.reader import Cache
from cache_store.errors import SourceError
from cache_store.format.array import ArraySpec
from cache_store.format.plan import answers_of, text_of
from cache_store.format.tables import CLIP_START, REJECTED, TOKENS, WITHDRAWN
from cache_store.gallery.pictures import choose_frames, frames_shown, preview, psnr, side_by_side, thumbnails
from cache_store.program.progress_bar import ProgressBar

DRAWN_SAMPLES, DRAWN_SHARDS, DRAWN_BYTES = 16_384, 64, 2**28
"""Limits of the draw for histograms: enough samples for smooth ones, in a few seconds."""

BATCH = 4
"""Frames in memory at full size, but at least one sample."""

TILE = 180
"""Pixels of a square picture's side on the page; other pictures have about its area, a clip's frames a fourth of it."""

EXHIBIT_COLUMNS = frozenset(
    {"row", "id", "uri", "place", "content_sha256", "conversations", "reason", "width", "height", TOKENS, CLIP_START}
)
"""Columns that are read if the cache has them."""

Decode = Callable[[np.ndarray], np.ndarray]
"""Decodes stored samples [N, *shape] to uint8 [N, T, Y, X, 3]."""


def random_numbers(cache: Cache, rows: int, seed: int) -> NDArray[np.int64]:
    """Draw sample numbers over the whole cache, and one more of each size not drawn; ascending."""
    random = generator(seed, "random")
    numbers = draw_numbers(len(cache), rows, random)
    counts, shown = cache.shards.roll.cached, cache.array_indices(numbers)
    shards = [np.flatnonzero((cache.spec.array_indices == each) & (counts > 0)) for each in range(len(cache.arrays))]
    missing = [random.choice(each) for index, each in enumerate(shards) if len(each) and index not in shown]
    more = [int(cache.shards.starts[each] + random.integers(counts[each])) for each in missing]
    return np.sort([*numbers, *more])


def numbers_to_count(cache: Cache, seed: int) -> NDArray[np.int64]:
    """Choose samples for histograms: all of a small cache, or a draw from random shards of a large one; ascending."""
    limit = min(DRAWN_SAMPLES, max(1, DRAWN_BYTES // max(each.sample_bytes for each in cache.arrays)))
    counts = cache.shards.roll.cached
    occupied = np.flatnonzero(counts)
    if len(cache) <= limit and len(occupied) <= DRAWN_SHARDS:
        return np.arange(len(cache))
    random = generator(seed, "histograms")
    shards = occupied[draw_numbers(len(occupied), min(DRAWN_SHARDS, limit), random)]
    share = -(-limit // len(shards))
    starts = cache.shards.starts
    return np.concatenate([starts[each] + draw_numbers(int(counts[each]), share, random) for each in shards])


def draw_rejects(cache: Cache, rows: int, seed: int) -> list[dict[str, Any]]:
    """Draw at most `rows` rejected rows, in row order; reads only the samples tables that have them."""
    rejected = np.diff(cache.spec.bounds) - cache.shards.roll.cached
    ends = np.cumsum(rejected)
    places = draw_numbers(int(ends[-1]), rows, generator(seed, "rejects"))
    shards, found = np.searchsorted(ends, places, side="right"), list[dict[str, Any]]()
    for shard in np.unique(shards):
        table = cache.shards.table(int(shard))
        within = places[shards == shard] - (ends[shard] - rejected[shard])
        found += table.filter(pc.equal(table["status"], REJECTED)).take(within).to_pylist()
    return found


def generator(seed: int, purpose: str) -> np.random.Generator:
    # A stream per purpose: more rows of one kind do not change the others.
    return np.random.default_rng([seed, *purpose.encode()])


def draw_numbers(count: int, wanted: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw `wanted` distinct numbers of [0, count), or all, ascending."""
    if wanted >= count:
        return np.arange(count)
    return np.sort(random.choice(count, wanted, replace=False, shuffle=False))


def batches(cache: Cache, numbers: np.ndarray, size: Callable[[ArraySpec], int]) -> Iterator[np.ndarray]:
    indices = cache.array_indices(numbers)
    for index in np.unique(indices):
        mine, step = numbers[indices == index], max(1, size(cache.arrays[index]))
        yield from (mine[start : start + step] for start in range(0, len(mine), step))


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One row; pictures are uint8 RGB, or None. A clip's pictures have several frames side by side."""

    row: int
    id: str
    uri: str
    size: tuple[int, int] | None
    """Width and height of the original image or video."""
    tokens: int | None = None
    """Number of the text's tokens before it was cut; None for an image."""
    caption: str
    reason: str | None = None
    """Why it was rejected."""
    source: np.ndarray | None = None
    """The image, or frames of the clip, as the encoder saw it."""
    source_problem: str | None = None
    """Why the source image is missing, or may not be the encoded one."""
    preview: np.ndarray | None = None
    decoded: np.ndarray | None = None
    psnr: float | None = None
    array: ArraySpec

    @property
    def frames(self) -> int:
        return frames_shown(self.array)

    @property
    def width(self) -> int:
        _, height, width = self.array.size
        aspect = min(4.0, width / height)
        return round(TILE / min(2, self.frames) * math.sqrt(aspect)) * self.frames


@dataclass(frozen=True, kw_only=True)
class Showcase:
    """Turns rows into exhibits."""

    cache: Cache
    read_image: ReadImage | None
    decode: Decode | None
    source_problem: str | None = None

    def cached(self, numbers: Iterable[int]) -> dict[int, Exhibit]:
        ordered, exhibits = np.array(sorted(set(numbers)), np.int64), dict[int, Exhibit]()
        with ProgressBar("rows", len(ordered), "row") as bar:
            for batch in batches(self.cache, ordered, lambda array: BATCH // array.size.frames):
                exhibits.update(zip(batch.tolist(), self._batch(batch), strict=True))
                bar.update(len(batch))
        return exhibits

    def rejected(self, samples: Iterable[dict[str, Any]]) -> list[Exhibit]:
        spec = self.cache.spec
        return [self._exhibit(sample, spec.array_of(spec.shard_of_row(sample["row"]))) for sample in samples]

    def _batch(self, numbers: np.ndarray) -> Iterator[Exhibit]:
        stored, array = self.cache.read(numbers), self.cache.array_of(numbers)
        decoded_N = self.decode(stored) if self.decode else [None] * len(numbers)
        columns = [name for name in self.cache.columns if name in EXHIBIT_COLUMNS]
        samples = self.cache.samples(numbers, columns).to_pylist()
        for sample, values, decoded in zip(samples, stored.astype(np.float32), decoded_N, strict=True):
            yield self._exhibit(sample, array, values, decoded)

    def _exhibit(
        self,
        sample: dict[str, Any],
        array: ArraySpec,
        values: np.ndarray | None = None,
        decoded_TYX3: np.ndarray | None = None,
    ) -> Exhibit:
        """Collect what the samples table, the source and a cached row's values show."""
        source_SYX3, problem = self._source(sample, array)
        pictures, to_rgb, frames = dict[str, Any](), self.cache.seal.array.preview, frames_shown(array)
        if source_SYX3 is not None:
            pictures["source"] = thumbnails(source_SYX3)
        if values is not None and to_rgb is not None:
            values_CTHW = values.reshape(len(values), -1, *array.preview_cells)
            pictures["preview"] = side_by_side(choose_frames(preview(values_CTHW, to_rgb), frames))
        if decoded_TYX3 is not None:
            decoded_SYX3 = choose_frames(decoded_TYX3, frames)
            pictures["decoded"] = thumbnails(decoded_SYX3)
            if source_SYX3 is not None and problem is None:
                pictures["psnr"] = psnr(source_SYX3, decoded_SYX3)
        answers = answers_of(turns := sample["conversations"])
        if array.text is not None:
            text = text_of(array.text, sample["id"], turns)
            answers = [] if text is None else [text]
        width, height = sample.get("width"), sample.get("height")
        return Exhibit(
            row=sample["row"],
            id=sample["id"],
            uri=sample["uri"],
            size=(width, height) if width and height else None,
            tokens=sample.get(TOKENS),
            caption=" · ".join(" ".join(answer.split()) for answer in answers),
            reason=sample["reason"],
            source_problem=problem,
            array=array,
            **pictures,
        )

    def _source(self, sample: dict[str, Any], array: ArraySpec) -> tuple[np.ndarray | None, str | None]:
        """Read the source, [S, Y, X, 3], and say what is wrong with it."""
        if sample["reason"] == WITHDRAWN:
            return None, WITHDRAWN  # not shown, even if the source still has it
        if self.read_image is None:
            return None, self.source_problem
        try:
            picture, found = self.read_image(sample, array)
        except SourceError as error:
            return None, str(error)
        recorded, problem = sample["content_sha256"], None
        if recorded is None:
            problem = "this file could not be read when the cache was built"
        elif recorded != found:
            problem = "this file has changed since it was encoded"
        return choose_frames(picture, frames_shown(array)), problem
