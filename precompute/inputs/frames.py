"""Frames of a source's images and videos, fitted as the recipe says."""

# Axes: T frames, Y X pixels, 3 RGB.

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from threading import Semaphore
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from cache_store.cache.writer import Outcome
from cache_store.format.array import ArraySpec, ImageRecipe, Size
from cache_store.format.tables import CLIP_START
from cache_store.storage.prefetch import SharedResults
from precompute.clips.config import ClipConfig, count_for
from precompute.clips.video import Video, decode_clip, probe_video
from precompute.images.buckets import Placement, Sides
from precompute.images.decode import content_sha256, decode_image, size_from_head, size_of
from precompute.images.fit import fit_image, placement_of
from precompute.images.rejected import Rejected
from precompute.inputs.busy import BusyTimes
from precompute.inputs.clip_list import clips_in_plan, list_clips, with_checked_starts
from precompute.inputs.reader import Inputs, Reader, Sample
from precompute.sources.images import Images
from precompute.sources.listing import Samples
from precompute.sources.place import MISSING, TOO_LARGE, PartStream, Place, planned_place

Where = tuple[str, Place | None]

DIGESTS_HELD = 1_024

VIDEOS_HELD = 16
"""Whole videos in memory: about one a thread, because the clips of a video are neighbours in the plan."""

VIDEOS_PROBED = 2**20
"""Videos whose lengths and sizes are in memory while planning, 250 bytes each, so that each is looked at once."""

TEXT_ONLY = "text only"
"""Kind of reject for a record that names no file, such as some of LLaVA's instructions."""

BROKEN_EXIF = "broken EXIF, not turned"
INTERLACED = "interlaced frames, encoded as progressive"


class FrameReader(Reader):
    """Reads one sample at a time from a source; a subclass reads a kind of file."""

    columns: Sequence[str] = ("uri", "fingerprint", "place")

    def __init__(self, source: Images, recipe: ImageRecipe, busy: BusyTimes | None = None) -> None:
        self._source, self._recipe, self._busy = source, recipe, busy or BusyTimes()

    def expect(self, samples: Iterable[Sample]) -> None:
        self._source.expect(sample["uri"] for sample in samples if sample["uri"])

    def read(self, samples: Sequence[Sample], array: ArraySpec, out: Sequence[Inputs]) -> list[Outcome]:
        return [self._read_one(sample, array.size, place) for sample, place in zip(samples, out, strict=True)]

    def _read_one(self, sample: Sample, size: Size, place: Inputs) -> Outcome:
        facts = dict[str, Any](content_sha256=None)
        try:
            if not sample["uri"]:
                raise Rejected(TEXT_ONLY, f"the record names no {'video' if self._recipe.clip else 'image'}")
            self._fill(sample, size, place, facts)
        except Rejected as rejected:
            facts["reason"] = rejected.reason
        return Outcome(**facts)

    @abstractmethod
    def _fill(self, sample: Sample, size: Size, place_TYX3: Inputs, facts: dict[str, Any]) -> None:
        """Fill the frames of a sample, and note what is known of it; raise Rejected if that is impossible."""


class ImageReader(FrameReader):
    """Reads images, a frame each; `threads` of them at a time if their first bytes do not tell their size."""

    def __init__(self, source: Images, recipe: ImageRecipe, busy: BusyTimes | None = None, threads: int = 1) -> None:
        super().__init__(source, recipe, busy)
        self._whole = Semaphore(threads)

    def size(self, sample: Sample) -> Size | None:
        if sample["fingerprint"] == MISSING:
            return None
        with suppress(Rejected):
            sides = size_from_head(self._source.read_head(*where_of(sample)))
            if sides is None:
                with self._whole:
                    sides = size_of(self._source.read(*where_of(sample)), self._recipe.max_pixels)
            return None if sides is None else Size(1, sides[1], sides[0])
        return None

    def digest(self, sample: Sample) -> str:
        return content_sha256(self._source.read(*where_of(sample)))

    def _fill(self, sample: Sample, size: Size, place_TYX3: Inputs, facts: dict[str, Any]) -> None:
        with self._busy.measured("source"):
            data = self._source.read(*where_of(sample))
        facts["content_sha256"] = content_sha256(data)
        image = decode_image(data, self._recipe, size)
        facts["remarks"] = () if image.exif_is_readable else (BROKEN_EXIF,)
        placement = placement_of(image.size, self._recipe, size)
        facts |= placed(image.size, placement)
        place_TYX3[0] = np.asarray(fit_image(image, self._recipe, placement))


class ClipReader(FrameReader):
    """Reads clips of videos; each video is opened in place, hashed once, and while planning looked at once."""

    columns: Sequence[str] = (*FrameReader.columns, CLIP_START)

    def __init__(
        self,
        source: Images,
        recipe: ImageRecipe,
        clips: ClipConfig | None = None,
        busy: BusyTimes | None = None,
    ) -> None:
        super().__init__(source, recipe, busy)
        assert recipe.clip, "a recipe of images"
        self._clip, self._clips = recipe.clip, clips
        self._whole = SharedResults[Where, bytes](lambda where: self._source.read(*where), VIDEOS_HELD)
        self._digests = SharedResults[tuple[Where, str], str](lambda key: self._hash(*key[0]), DIGESTS_HELD)
        self._probed = lru_cache(VIDEOS_PROBED)(self._probe)

    def samples(self, listed: Samples, planned: Iterable[pa.Table] = ()) -> Samples:
        if CLIP_START in listed.extra:
            return replace(listed, each=with_checked_starts(listed), captioned=Counter())
        assert self._clips, "for reading alone"
        clips = list_clips(listed, self._clips, self.probe, clips_in_plan(planned, self._clips))
        return replace(listed, each=clips, captioned=Counter(), extra=(*listed.extra, CLIP_START))

    def probe(self, sample: Sample) -> Video | None:
        return None if sample["fingerprint"] == MISSING else self._probed(*where_of(sample))

    def _probe(self, uri: str, place: Place | None) -> Video | None:
        try:
            with self._source.open(uri, place) as stream:
                return probe_video(stream, self._recipe.max_pixels)
        except Rejected:
            return None

    def expect(self, samples: Iterable[Sample]) -> None:
        """Do nothing: a video that is announced for each of its clips would be fetched again."""

    def size(self, sample: Sample) -> Size | None:
        if (video := self.probe(sample)) is None:
            return None
        left = video.num_frames(self._clip.fps) - round(sample[CLIP_START] * (self._clip.fps or video.rate))
        frames = count_for(self._clip.counts, left)
        return None if frames is None else Size(frames, video.height, video.width)

    def _fill(self, sample: Sample, size: Size, place_TYX3: Inputs, facts: dict[str, Any]) -> None:
        where = where_of(sample)
        with self._busy.measured("source"):
            stream = self._open(where)
        with stream:
            with self._busy.measured("source"):
                facts["content_sha256"] = self._sha256(where, stream)
            clip = decode_clip(stream, sample[CLIP_START], self._recipe, size)
            facts |= placed(clip.size, clip.placement)
            for number, image in enumerate(clip.images):
                place_TYX3[number] = np.asarray(image)
            facts["remarks"] = [INTERLACED] * clip.is_interlaced

    def _open(self, where: Where) -> BinaryIO:
        """Open a video in place, or in memory if it comes from a network and is not too large."""
        if self._source.fetches_ahead:
            try:
                return BytesIO(self._whole.get(where))
            except Rejected as rejected:
                if rejected.kind != TOO_LARGE:
                    raise
        return self._source.open(*where)

    def digest(self, sample: Sample) -> str:
        with self._open(where := where_of(sample)) as stream:
            return self._sha256(where, stream)

    def _sha256(self, where: Where, stream: BinaryIO) -> str:
        """Return the SHA-256 of a whole video; its open `stream` stays where it is."""
        if isinstance(stream, BytesIO):
            return content_sha256(stream.getbuffer())
        assert isinstance(stream, PartStream)
        return self._digests.get((where, stream.version))

    def _hash(self, uri: str, place: Place | None) -> str:
        with self._source.open(uri, place) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto


def where_of(sample: Sample) -> Where:
    return sample["uri"], planned_place(sample["place"])


def placed(size: Sides, placement: Placement) -> dict[str, int]:
    (width, height), resized, crop = size, placement.resized, placement.crop
    across = {"width": width, "resized_width": resized[0], "crop_left": crop[0]}
    return across | {"height": height, "resized_height": resized[1], "crop_top": crop[1]}
