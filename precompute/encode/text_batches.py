"""Planned batches of texts, which stand in the plan: their tokens go the way of pixels."""

# Axes: N texts of a batch, T tokens that the encoder reads of each.

import time
from functools import partial
from typing import Self

import pyarrow as pa

from cache_store.cache.writer import Outcome
from cache_store.format.schema import ArraySpec, Spec
from precompute.encode.batches import Batch, Decoders, MakeBatch, Room
from precompute.encode.busy import BusyTimes
from precompute.encoders.encoder import NO_TOKEN, Encoder, TextEncoder
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.sources.archives.image_store import Images
from precompute.sources.turns import answer_of

NO_TEXT = Rejected("no text", "the sample has no caption")


class TextBatch(Batch):
    """A planned batch of texts; the place of a sample without text is all padding."""

    def __init__(
        self, encoder: TextEncoder, spec: Spec, planned: pa.Table, shard: int, start: int, room: Room | None = None
    ) -> None:
        super().__init__(spec, planned, shard, start, room)
        self._encoder = encoder

    def _furnish(self, array: ArraySpec) -> None:
        self.inputs[:] = NO_TOKEN
        self.rgb_Nhw3 = None

    def decode(self, pool: Decoders, source: Images, busy: BusyTimes | None = None) -> Self:
        """Start making tokens; `wait` until it is done. Nothing is read of the source."""
        self._pieces.append(pool.submit(self._tokenize, busy))
        return self

    def _tokenize(self, busy: BusyTimes | None) -> list[Outcome]:
        started = time.monotonic()
        texts = [answer_of(turns) for turns in self.samples["conversations"].to_pylist()]
        made = iter(self._encoder.tokens([text for text in texts if text]))
        outcomes = []
        for place, text in enumerate(texts):
            if not text:
                outcomes.append(Outcome(content_sha256=None, reason=NO_TEXT.reason))
                continue
            tokens = next(made)
            self.inputs[place, : len(tokens.ids)] = tokens.ids
            outcomes.append(Outcome(content_sha256=content_sha256(text.encode()), tokens=tokens.whole))
        if busy:
            busy.add("decoding", time.monotonic() - started)
        return outcomes


def batches_for(encoder: Encoder) -> MakeBatch:
    """How batches are made for an encoder: of texts where it reads them, else of images."""
    return partial(TextBatch, encoder) if isinstance(encoder, TextEncoder) else Batch
