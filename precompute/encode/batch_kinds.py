"""Batches of clips and of texts, and which kind an encoder takes."""

import time
from collections.abc import Iterable
from functools import partial
from typing import BinaryIO, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.writer import WITHDRAWN_SAMPLE, Outcome
from cache_store.format.array import ArraySpec
from cache_store.format.plan import is_withdrawn, text_of
from cache_store.format.schema import Spec
from precompute.encode.batches import Batch, Decoders, MakeBatch, Planned, Room, TimedReading
from precompute.encode.job import BusyTimes
from precompute.encoders.encoder import NO_TOKEN, Encoder, TextEncoder
from precompute.images.decode import content_sha256
from precompute.images.pixels import write_pixels
from precompute.images.rejected import Rejected
from precompute.sources.image_store import Images
from precompute.sources.videos import Videos

# Axes: N samples of a batch, T frames, Y X pixels, h w cells of a preview, 3 RGB.


STILL, CELLS = 0.1, 4
"""Levels, of one pixel in CELLS x CELLS, by which a frame differs at most on average from the frame that it repeats:
H.264 changes a picture that stands still by up to 0.04."""

INTERLACED = "interlaced frames, encoded as progressive"
STANDING = "repeated frames, more than three quarters"


class ClipBatch(Batch):
    """A planned batch of clips; the preview is of each one's middle frame."""

    def __init__(
        self, videos: Videos, spec: Spec, planned: pa.Table, shard: int, start: int, room: Room | None = None
    ) -> None:
        super().__init__(spec, planned, shard, start, room)
        self._videos = videos

    def _prefetch(self, source: Images, uris: Iterable[str]) -> None:
        """Prefetch nothing: threads share the videos that they read."""

    def _decode_one(self, planned: Planned, uri: str, reading: TimedReading) -> Outcome:
        outcome = Outcome(content_sha256=None)
        try:
            source, place = reading.source, planned.place
            with reading.timed(lambda: self._videos.open(source, uri, place)) as stream:
                digest = reading.timed(lambda: self._videos.sha256(source, uri, place, stream))
                outcome = outcome._replace(content_sha256=digest)
                outcome = self._put_clip(outcome, planned, stream)
        except Rejected as rejected:
            outcome = outcome._replace(reason=rejected.reason)
            self._put_grey(planned.number)
        return outcome

    def _put_clip(self, outcome: Outcome, planned: Planned, stream: BinaryIO) -> Outcome:
        """Fill the pixels of a clip, and its preview's; return the outcome with its size."""
        from precompute.clips.video import decode_clip, refuse_without_bucket  # needs PyAV

        pixels_TYX3, start = self.pixels_NYX3[planned.number], planned.clip_start or 0.0
        rgb_hw3 = None if self.rgb_Nhw3 is None else self.rgb_Nhw3[planned.number]
        size, frames, is_interlaced = decode_clip(stream, start, self.recipe)
        try:
            outcome = self._placed(outcome, size)
        except Rejected:
            refuse_without_bucket(stream, start, self.recipe)
            raise
        for place, frame in enumerate(frames):
            write_pixels(frame, pixels_TYX3[place], rgb_hw3 if place == len(pixels_TYX3) // 2 else None)
        odd = {INTERLACED: is_interlaced, STANDING: 4 * count_different(pixels_TYX3) < len(pixels_TYX3)}
        return outcome._replace(remarks=[name for name, is_so in odd.items() if is_so])


def count_different(pixels_TYX3: NDArray[np.uint8]) -> int:
    """Count the frames that differ from the one before, and the first."""
    few_Tyx3 = pixels_TYX3[:, ::CELLS, ::CELLS].astype(np.int16)
    return 1 + int((np.abs(np.diff(few_Tyx3, axis=0)).mean((1, 2, 3)) > STILL).sum())


NO_TEXT = Rejected("no text", "the sample has no caption")


class TextBatch(Batch):
    """A planned batch of texts, which stand in the plan; the place of a sample without text is all padding."""

    def __init__(
        self, encoder: TextEncoder, spec: Spec, planned: pa.Table, shard: int, start: int, room: Room | None = None
    ) -> None:
        super().__init__(spec, planned, shard, start, room)
        self._encoder = encoder

    def _prepare(self) -> None:
        self.inputs[:] = NO_TOKEN
        self.rgb_Nhw3 = None

    def decode(self, pool: Decoders, source: Images, busy: BusyTimes | None = None) -> Self:
        """Start to make tokens; the source is not read."""
        self._pieces.append(pool.submit(self._tokenize, busy))
        return self

    def _tokenize(self, busy: BusyTimes | None) -> list[Outcome]:
        started = time.monotonic()
        assert self.array.text is not None
        samples = zip(*(self.samples[name].to_pylist() for name in ("id", "conversations")), strict=True)
        texts = [text_of(self.array.text, *sample) for sample in samples]
        is_gone = is_withdrawn(self.samples).tolist()
        made = iter(self._encoder.tokens([text for text in texts if text is not None]))
        outcomes = []
        for place, text in enumerate(texts):
            if text is None:
                without = Outcome(content_sha256=None, reason=NO_TEXT.reason)
                outcomes.append(WITHDRAWN_SAMPLE if is_gone[place] else without)
                continue
            tokens = next(made)
            self.inputs[place, : len(tokens.ids)] = tokens.ids
            outcomes.append(Outcome(content_sha256=content_sha256(text.encode()), tokens=tokens.whole))
        if busy:
            busy.add("decoding", time.monotonic() - started)
        return outcomes

    def refuse_vanished(self) -> None:
        """Do nothing: texts cannot vanish from the plan."""


def batches_for(encoder: Encoder, array: ArraySpec) -> MakeBatch:
    """Return what makes batches for the encoder: of texts, clips or images."""
    if isinstance(encoder, TextEncoder):
        return partial(TextBatch, encoder)
    return partial(ClipBatch, Videos()) if array.made_of == "clip" else Batch
