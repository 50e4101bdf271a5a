"""Planned batches of images, clips or texts, decoded ahead of the encoder.

A sample's bits depend on its batch, so the plan fixes the batches: the rows of a shard in order, cut every
`batch_size`; grey takes the place of a rejected image. A text's tokens take the place of pixels.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, compress, count, repeat
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from PIL.Image import Image

from cache_store.cache.metadata import open_plan
from cache_store.cache.writer import WITHDRAWN_SAMPLE, Outcome
from cache_store.errors import SourceError
from cache_store.format.array import ArraySpec
from cache_store.format.plan import is_withdrawn
from cache_store.format.schema import Spec
from cache_store.format.tables import CLIP_START, reason_kind
from cache_store.storage.prefetch import begun_ahead
from cache_store.storage.store import Store
from precompute.encode.job import BusyTimes
from precompute.encoders.encoder import NO_TOKEN
from precompute.images.buckets import Size
from precompute.images.decode import content_sha256, decode_image
from precompute.images.fit import MID_GREY, fit_image, placement_of
from precompute.images.pixels import write_pixels
from precompute.images.rejected import Rejected
from precompute.sources.image_store import Images, prefetch_of
from precompute.sources.place import MISSING, Place, planned_place

# Axes: N images of a batch, B of a full one, Y X pixels, h w cells of a preview, 3 RGB, T tokens of a text or frames.


BATCHES_AHEAD = 3
"""Decoded batches that wait for the encoder. With those being encoded and written, they bound memory."""

AHEAD_BYTES = 2**30
"""Most bytes of decoded batches that wait, unless one batch is larger: a clip of 81 x 480 x 832 takes 97 MB."""

PIECE_IMAGES = 4
"""Most images that a thread gets at a time: handing a piece over takes a fortieth of a small photograph's decoding,
and an interrupted build waits for the pieces already handed over.
"""


BROKEN_EXIF = "broken EXIF, not turned"

T = TypeVar("T")


class Decoders(ThreadPoolExecutor):
    """A pool of decode threads."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="decode")
        self.num_threads = threads

    def piece_images(self, batch_images: int) -> int:
        """Return how many images to hand over at a time: each thread gets two pieces or more of the batches ahead."""
        return max(1, min(PIECE_IMAGES, BATCHES_AHEAD * batch_images // (2 * self.num_threads)))


class TimedReading:
    """A source for one thread, and the seconds that reading takes."""

    def __init__(self, source: Images) -> None:
        self.source, self.seconds = source, 0.0

    def timed(self, read: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return read()
        finally:
            self.seconds += time.monotonic() - started


Room = np.ndarray
"""Memory for the input of a full batch: pixels, uint8 [B, Y, X, 3], of clips [B, T, Y, X, 3], or tokens, int32 [B, T].
"""


class InputLayout(NamedTuple):
    """Shape and dtype of an encoder's input for a full batch."""

    shape: tuple[int, ...]
    dtype: type[np.integer[Any]]
    filler: int
    """Fills the unused places of a short batch."""


def inputs_of(array: ArraySpec) -> InputLayout:
    """Return the input of the array's encoder: pixels of images, or tokens of texts."""
    if array.text is not None:
        return InputLayout((array.encoder.batch_size, array.text.drop + array.text.max_tokens), np.int32, NO_TOKEN)
    image, frames = array.images, (array.images.clip.frames,) if array.images.clip else ()
    return InputLayout((array.encoder.batch_size, *frames, image.height, image.width, 3), np.uint8, MID_GREY)


def batches_ahead(spec: Spec, threads: int) -> int:
    """Return how many batches are decoded ahead; of clips, two for each thread, as far as memory allows."""
    if spec.array.made_of != "clip":
        return BATCHES_AHEAD
    largest = max(math.prod(inputs_of(array).shape) for array in spec.sized_arrays)  # bytes, since pixels are uint8
    return max(1, min(max(BATCHES_AHEAD, 2 * threads), AHEAD_BYTES // largest))


class Rooms:
    """A pool of rooms that are used again, because fresh memory has to be zeroed, and for a GPU pinned.

    It holds rooms of one size: a build encodes one size after the other, and many sizes would fill the memory.
    """

    def __init__(self, make: Callable[[ArraySpec], Room]) -> None:
        self._make, self._free, self._shape = make, deque[Room](), tuple[int, ...]()

    def take(self, array: ArraySpec) -> Room:
        """Return a free room for a batch of the array, or a new one; its pixels are undefined."""
        if (shape := inputs_of(array).shape) != self._shape:
            self._free.clear()
            self._shape = shape
        try:
            return self._free.pop()
        except IndexError:
            return self._make(array)

    def give_back(self, room: Room) -> None:
        if room.shape == self._shape:
            self._free.append(room)


def make_room(array: ArraySpec) -> Room:
    shape, dtype, _ = inputs_of(array)
    return np.empty(shape, dtype)


class Planned(NamedTuple):
    """A sample of a batch."""

    number: int
    """Its place in the batch."""
    uri: str | None
    """None if it is withdrawn."""
    place: Place | None
    """Where planning found its file."""
    clip_start: float | None
    """Seconds; None for an image."""


class Batch:
    """A planned batch of images. Threads decode into it, each image into its own place."""

    def __init__(self, spec: Spec, planned: pa.Table, shard: int, start: int, room: Room | None = None) -> None:
        self.spec, self.shard, self.planned, self.start = spec, shard, planned, start
        self.array = spec.array_of(shard)
        self.stop = min(start + spec.array.encoder.batch_size, planned.num_rows)
        self.room = make_room(self.array) if room is None else room
        self.inputs = self.room[: self.stop - start]
        """The encoder's input: the batch's part of the room, complete after `wait`."""
        self._pieces: list[Future[list[Outcome]]] = []
        self.encoding_since = 0.0
        """When the encoder got the batch, by the monotonic clock."""
        self._prepare()

    def _prepare(self) -> None:
        self.recipe, self.pixels_NYX3 = self.array.images, self.inputs
        shape = len(self.inputs), *self.array.preview_cells, 3
        self.rgb_Nhw3 = np.empty(shape, np.uint8) if self.array.has_preview else None

    @property
    def samples(self) -> pa.Table:
        return self.planned.slice(self.start, self.stop - self.start)

    def decode(self, pool: Decoders, source: Images, busy: BusyTimes | None = None) -> Self:
        """Start decoding."""
        samples = self.samples
        uris, places = (samples[name].to_pylist() for name in ("uri", "place"))
        starts = samples[CLIP_START].to_pylist() if CLIP_START in samples.column_names else repeat(None)
        wanted = [None if is_gone else uri for uri, is_gone in zip(uris, is_withdrawn(samples), strict=True)]
        self._prefetch(source, (uri for uri in wanted if uri is not None))
        images = list(map(Planned, count(), wanted, map(planned_place, places), starts))
        size = pool.piece_images(len(images))
        for start in range(0, len(images), size):
            self._pieces.append(pool.submit(self._decode_piece, source, images[start : start + size], busy))
        return self

    def _prefetch(self, source: Images, uris: Iterable[str]) -> None:
        prefetch_of(source)(uris)

    def _decode_piece(self, source: Images, images: Iterable[Planned], busy: BusyTimes | None) -> list[Outcome]:
        reading, started = TimedReading(source), time.monotonic()
        outcomes = [
            self._withdrawn(each.number) if each.uri is None else self._decode_one(each, each.uri, reading)
            for each in images
        ]
        if busy:
            busy.add("source", reading.seconds)
            busy.add("decoding", time.monotonic() - started - reading.seconds)
        return outcomes

    def _decode_one(self, planned: Planned, uri: str, reading: TimedReading) -> Outcome:
        outcome = Outcome(content_sha256=None)
        try:
            data = reading.timed(lambda: reading.source.read(uri, planned.place))
            outcome = outcome._replace(content_sha256=content_sha256(data))
            image = decode_image(data, self.recipe)
            remarks = [] if image.exif_is_readable else [BROKEN_EXIF]
            outcome = self._placed(outcome._replace(remarks=remarks), image.size)
            self.put(planned.number, fit_image(image, self.recipe))
        except Rejected as rejected:
            outcome = outcome._replace(reason=rejected.reason)
            self._put_grey(planned.number)
        return outcome

    def _placed(self, outcome: Outcome, size: Size) -> Outcome:
        """Add an image's size, and how it was placed; raise Rejected if the image belongs elsewhere."""
        outcome = outcome._replace(width=size[0], height=size[1])
        if (placement := placement_of(size, self.recipe)) is None:
            return outcome
        (width, height), (left, top) = placement.resized, placement.crop
        return outcome._replace(resized_width=width, resized_height=height, crop_left=left, crop_top=top)

    def _withdrawn(self, number: int) -> Outcome:
        self._put_grey(number)
        return WITHDRAWN_SAMPLE

    def _put_grey(self, number: int) -> None:
        self.pixels_NYX3[number] = MID_GREY
        if self.rgb_Nhw3 is not None:
            self.rgb_Nhw3[number] = MID_GREY

    def put(self, number: int, fitted: Image) -> None:
        """Fill the pixels of an image of the batch, and its preview's."""
        write_pixels(fitted, self.pixels_NYX3[number], None if self.rgb_Nhw3 is None else self.rgb_Nhw3[number])

    @property
    def is_ready(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> list[Outcome]:
        """Wait until the batch is decoded; return the outcome of each sample, in row order."""
        for piece in reversed(self._pieces):  # the last piece first, so that this thread wakes up only once
            piece.result()
        return [outcome for piece in self._pieces for outcome in piece.result()]

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


class MakeBatch(Protocol):
    """Makes a batch of images, clips or texts."""

    def __call__(self, spec: Spec, planned: pa.Table, shard: int, start: int, room: Room | None = None) -> Batch:
        """Make the batch that starts at row `start` of a shard; `planned` has the shard's rows."""


def planned_batches(
    store: Store,
    spec: Spec,
    shards: Iterable[int],
    take_room: Callable[[ArraySpec], Room] = make_room,
    make_batch: MakeBatch = Batch,
) -> Iterator[Batch]:
    """Yield every batch of these shards, in order, not yet decoded; in rooms from `take_room`, or in new memory."""
    plan = open_plan(store)
    for shard in shards:
        planned, array = plan.shard(shard), spec.array_of(shard)
        for start in range(0, planned.num_rows, spec.array.encoder.batch_size):
            yield make_batch(spec, planned, shard, start, take_room(array))


def decoded_batches(
    batches: Iterator[Batch], pool: Decoders, source: Images, busy: BusyTimes | None = None
) -> Iterator[Batch]:
    """Return the same batches; start to decode each one some batches earlier. Add the seconds to `busy`."""
    if (first := next(batches, None)) is None:
        return iter(())
    ahead = batches_ahead(first.spec, pool.num_threads)
    return begun_ahead((batch.decode(pool, source, busy) for batch in chain([first], batches)), ahead)
