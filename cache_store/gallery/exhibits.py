"""Collect everything that the page shows of one row; pictures become thumbnails, a few rows at a time."""

# Axes: N samples, Y X pixels, 3 RGB.

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from cache_store.cache.images import ReadImage
from cache_store.cache.reader import Cache
from cache_store.errors import SourceError
from cache_store.format.plan import answers_of
from cache_store.format.tables import TOKENS
from cache_store.gallery.draw import batches
from cache_store.gallery.pictures import channel_strip, error_map, preview, psnr, thumbnail
from cache_store.program.progress_bar import progress_bar

Decode = Callable[[np.ndarray], np.ndarray]
"""Decodes stored samples [N, *shape] to uint8 [N, Y, X, 3]."""

BATCH = 4
"""Rows in memory at full size."""

EXHIBIT_COLUMNS = ["row", "id", "uri", "content_sha256", "conversations", "reason"]


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One row; pictures are uint8 RGB, or None."""

    row: int
    id: str
    uri: str
    size: tuple[int, int] | None
    """Width and height of the original image."""
    tokens: int | None = None
    """Number of the text's tokens before it was cut; None for an image."""
    caption: str
    reason: str | None = None
    """Why it was rejected."""
    source: np.ndarray | None = None
    """The image as the encoder saw it."""
    source_problem: str | None = None
    """Why the source image is missing, or may not be the encoded one."""
    preview: np.ndarray | None = None
    strip: Image.Image | None = None
    decoded: np.ndarray | None = None
    error: np.ndarray | None = None
    psnr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Showcase:
    """Turns rows into exhibits."""

    cache: Cache
    read_image: ReadImage | None
    decode: Decode | None
    source_problem: str | None = None
    """Why there is no reader."""

    def cached(self, numbers: Iterable[int]) -> dict[int, Exhibit]:
        """Make the exhibits of cached samples, by sample number."""
        ordered = np.array(sorted(set(numbers)), np.int64)
        exhibits: dict[int, Exhibit] = {}
        with progress_bar(total=len(ordered), desc="rows", unit="row", delay=0.5) as bar:
            for batch in batches(ordered, BATCH):
                exhibits.update(zip(batch.tolist(), self._batch(batch), strict=True))
                bar.update(len(batch))
        return exhibits

    def rejected(self, samples: Iterable[dict[str, Any]]) -> list[Exhibit]:
        """Make the exhibits of rejected rows of the samples tables."""
        return [self._exhibit(sample)[0] for sample in samples]

    def _batch(self, numbers: np.ndarray) -> Iterator[Exhibit]:
        stored = self.cache.read(numbers)
        decoded_NYX3 = self.decode(stored) if self.decode else [None] * len(numbers)
        more = [TOKENS] if self.cache.spec.array.text else ["width", "height"]
        samples = self.cache.samples(numbers, [*EXHIBIT_COLUMNS, *more]).to_pylist()
        for sample, values, decoded_YX3 in zip(samples, stored.astype(np.float32), decoded_NYX3, strict=True):
            yield self._with_pictures(sample, values, decoded_YX3)

    def _with_pictures(self, sample: dict[str, Any], values: np.ndarray, decoded_YX3: np.ndarray | None) -> Exhibit:
        summary = self.cache.seal.array
        exhibit, source_YX3 = self._exhibit(sample)
        pictures: dict[str, Any] = {}
        if summary.preview is not None:
            pictures = {"preview": preview(values, summary.preview), "strip": channel_strip(values, summary)}
        if decoded_YX3 is not None:
            pictures["decoded"] = thumbnail(decoded_YX3)
            if source_YX3 is not None and exhibit.source_problem is None:
                pictures["error"] = thumbnail(error_map(source_YX3, decoded_YX3))
                pictures["psnr"] = psnr(source_YX3, decoded_YX3)
        return Exhibit(**{**vars(exhibit), **pictures})

    def _exhibit(self, sample: dict[str, Any]) -> tuple[Exhibit, np.ndarray | None]:
        """Collect what the samples table and the source know; also return the source at full size."""
        image_YX3, problem = self._source(sample)
        width, height = sample.get("width"), sample.get("height")
        answers = answers_of(sample["conversations"])
        exhibit = Exhibit(
            row=sample["row"],
            id=sample["id"],
            uri=sample["uri"],
            size=(width, height) if width and height else None,
            tokens=sample.get(TOKENS),
            caption=caption(answers[:1] if self.cache.spec.array.text else answers),
            reason=sample["reason"],
            source=None if image_YX3 is None else thumbnail(image_YX3),
            source_problem=problem,
        )
        return exhibit, image_YX3

    def _source(self, sample: dict[str, Any]) -> tuple[np.ndarray | None, str | None]:
        """Read the source image and say what is wrong with it; an unreadable image does not stop the gallery."""
        if self.read_image is None:
            return None, self.source_problem
        try:
            image, content_sha256 = self.read_image(sample["uri"])
        except SourceError as error:
            return None, str(error)
        return np.asarray(image), difference(sample["content_sha256"], content_sha256)


def difference(recorded: str | None, found: str) -> str | None:
    """Say why the picture shown is not the encoded one, or return None if it is."""
    if recorded is None:
        return "this file could not be read when the cache was built"
    return None if recorded == found else "this file has changed since it was encoded"


def caption(answers: Sequence[str]) -> str:
    """Join answers on one line."""
    return " · ".join(" ".join(answer.split()) for answer in answers)
