"""Planned batches, read ahead of the encoder.

A sample's bits depend on its batch, so the plan fixes the batches: the rows of a shard in order, cut every
`batch_size`; grey, or padding, takes the place of a rejected sample.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, compress
from typing import Self

import numpy as np
import pyarrow as pa
from PIL import Image

from cache_store.cache.metadata import open_plan
from cache_store.cache.writer import WITHDRAWN_SAMPLE, Outcome
from cache_store.errors import SourceError
from cache_store.format.array import ArraySpec
from cache_store.format.plan import is_withdrawn
from cache_store.format.schema import Spec
from cache_store.format.tables import reason_kind
from cache_store.storage.prefetch import keep_ahead
from cache_store.storage.store import Store
from precompute.inputs.busy import BusyTimes
from precompute.inputs.reader import Inputs, Reader, Sample, inputs_of
from precompute.sources.place import MISSING

# Axes: N samples of a batch, B of a full one, Y X pixels, h w cells of a preview, 3 RGB, T frames, or tokens of a text.


BATCHES_AHEAD = 3
"""Fewest batches that wait for the encoder. With those being encoded and written, they bound memory."""

AHEAD_BYTES = 2**30
"""Most bytes of batches that wait, unless one batch is larger: a clip of 81 x 480 x 832 takes 97 MB."""

PIECE_SAMPLES = 4
"""Most samples that a thread gets at a time: handing a piece over takes a fortieth of a small photograph's decoding,
and an interrupted build waits for the pieces already handed over.
"""


class Decoders(ThreadPoolExecutor):
    """A pool of threads that read samples."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="decode")
        self.num_threads = threads

    def piece_samples(self, batch_size: int) -> int:
        """Return how many samples to hand over at a time: each thread gets two pieces or more of the batches ahead."""
        return max(1, min(PIECE_SAMPLES, BATCHES_AHEAD * batch_size // (2 * self.num_threads)))

    def batches_ahead(self, spec: Spec) -> int:
        """Return how many batches to read ahead: two pieces for each thread, as far as memory allows."""
        size = spec.array.encoder.batch_size
        pieces = -(-size // self.piece_samples(size))
        largest = size * max(place_bytes(array) for array in spec.sized_arrays)
        return max(1, min(max(BATCHES_AHEAD, -(-2 * self.num_threads // pieces)), AHEAD_BYTES // largest))


def place_bytes(array: ArraySpec) -> int:
    shape, dtype, _ = inputs_of(array)
    return math.prod(shape) * np.dtype(dtype).itemsize


class InputBuffers:
    """Reuses buffers of one shape, inputs of a full batch: new memory must be zeroed and, for a GPU, pinned."""

    def __init__(self, make: Callable[[ArraySpec], Inputs]) -> None:
        self._make, self._free, self._shape = make, deque[Inputs](), tuple[int, ...]()

    def take(self, array: ArraySpec) -> Inputs:
        """Return a free buffer for a batch of the array, or a new one; its contents are undefined."""
        if (shape := batch_shape(array)) != self._shape:
            self._free.clear()
            self._shape = shape
        try:
            return self._free.pop()
        except IndexError:
            return self._make(array)

    def give_back(self, buffer: Inputs) -> None:
        if buffer.shape == self._shape:
            self._free.append(buffer)


def batch_shape(array: ArraySpec) -> tuple[int, ...]:
    return array.encoder.batch_size, *inputs_of(array).shape


def make_buffer(array: ArraySpec) -> Inputs:
    return np.empty(batch_shape(array), inputs_of(array).dtype)


class Batch:
    """A planned batch. Threads read into it, each sample into its own place."""

    def __init__(
        self, reader: Reader, spec: Spec, planned: pa.Table, shard: int, start: int, buffer: Inputs | None = None
    ) -> None:
        """Make the batch that starts at row `start` of a shard; `planned` has the shard's rows."""
        self._reader, self.shard, self.planned, self.start = reader, shard, planned, start
        self.spec, self.array = spec, spec.array_of(shard)
        self.stop = min(start + spec.array.encoder.batch_size, planned.num_rows)
        self.buffer = make_buffer(self.array) if buffer is None else buffer
        self.inputs = self.buffer[: self.stop - start]
        """The encoder's input: the batch's part of the buffer, complete after `wait`."""
        shape = len(self.inputs), *(self.array.preview_cells if self.array.has_preview else ()), 3
        self.rgb_Nhw3 = np.empty(shape, np.uint8) if self.array.has_preview else None
        self._outcomes = [WITHDRAWN_SAMPLE] * len(self.inputs)
        self._pieces: list[Future[None]] = []
        self.encoding_since = 0.0
        """When the encoder got the batch, by the monotonic clock."""

    @property
    def samples(self) -> pa.Table:
        return self.planned.slice(self.start, self.stop - self.start)

    def decode(self, pool: Decoders, busy: BusyTimes | None = None) -> Self:
        """Start to read the samples that are not withdrawn."""
        samples, is_gone = self.samples, is_withdrawn(self.samples)
        wanted = list(compress(enumerate(samples.select(self._reader.columns).to_pylist()), ~is_gone))
        self._reader.expect(sample for _, sample in wanted)
        for place in np.flatnonzero(is_gone).tolist():
            self._fill(place)
        size = pool.piece_samples(len(self.inputs))
        for first in range(0, len(wanted), size):
            self._pieces.append(pool.submit(self._read, wanted[first : first + size], busy or BusyTimes()))
        return self

    def _read(self, wanted: Sequence[tuple[int, Sample]], busy: BusyTimes) -> None:
        places, samples = zip(*wanted, strict=True)
        with busy.measured("decoding"):
            outcomes = self._reader.read(samples, self.array, [self.inputs[place] for place in places])
            for place, outcome in zip(places, outcomes, strict=True):
                self._outcomes[place] = outcome
                if outcome.reason is not None:
                    self._fill(place)
                elif self.rgb_Nhw3 is not None:
                    self.rgb_Nhw3[place] = preview_of(self.inputs[place], *self.array.preview_cells)

    def _fill(self, place: int) -> None:
        self.inputs[place] = inputs_of(self.array).filler
        if self.rgb_Nhw3 is not None:
            self.rgb_Nhw3[place] = 0  # not added to the sums: the sample is rejected

    @property
    def preview_rgb(self) -> np.ndarray | None:
        """RGB in [0, 1] at the preview's cells, float32 [N, h, w, 3]; None if the array has no preview."""
        return None if self.rgb_Nhw3 is None else self.rgb_Nhw3.astype(np.float32) / 255.0

    def wait(self) -> list[Outcome]:
        for piece in reversed(self._pieces):  # the last piece first, so that this thread wakes up only once
            piece.result()
        return self._outcomes

    def refuse_vanished(self) -> None:
        """Raise SourceError if an image vanished since planning: a lost mount is not the sample's fault."""
        outcomes = self.wait()
        is_missing = [reason_kind(outcome.reason or "") == MISSING for outcome in outcomes]
        if not any(is_missing):
            return
        columns = (self.samples[name].to_pylist() for name in ("id", "fingerprint"))
        for outcome, name, fingerprint in compress(zip(outcomes, *columns, strict=True), is_missing):
            if fingerprint != MISSING:
                raise SourceError(
                    f"the image of {name} was there when the cache was planned and is gone ({outcome.reason}); "
                    "restore the images and run the same command again"
                )


def preview_of(pixels_TYX3: Inputs, height: int, width: int) -> np.ndarray:
    """Average the middle frame over the cells of a preview, rounded to 8 bits: [h, w, 3]."""
    frame = Image.fromarray(pixels_TYX3[len(pixels_TYX3) // 2])
    return np.asarray(frame.reduce((frame.width // width, frame.height // height)))


def planned_batches(
    reader: Reader, store: Store, spec: Spec, shards: Iterable[int], take_buffer: Callable[[ArraySpec], Inputs]
) -> Iterator[Batch]:
    """Yield every batch of these shards, in order, not yet read, in buffers from `take_buffer`."""
    plan = open_plan(store, spec)
    for shard in shards:
        planned, array = plan.shard(shard), spec.array_of(shard)
        for start in range(0, planned.num_rows, spec.array.encoder.batch_size):
            yield Batch(reader, spec, planned, shard, start, take_buffer(array))


def decoded_batches(batches: Iterator[Batch], pool: Decoders, busy: BusyTimes | None = None) -> Iterator[Batch]:
    """Return the same batches; start to read each one some batches earlier. Add the seconds to `busy`."""
    if (first := next(batches, None)) is None:
        return iter(())
    ahead = pool.batches_ahead(first.spec)
    return keep_ahead((batch.decode(pool, busy) for batch in chain([first], batches)), ahead)
