"""One worker's work: decode, encode and write overlap, a few batches in memory, whole shards on disk.

A latent's bits depend on the batch that it was encoded in, so batches are planned: rows of a shard in order, cut
every `batch_size`, a rejected image's place filled with grey.
"""

# Axes: N images of a batch, Y X pixels, h w latent cells, 3 RGB, C latent channels.

import importlib.metadata
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch

from cache_store.errors import Interrupted, SourceError
from cache_store.plan import PlanFile
from cache_store.schema import LATENTS, CommitRecord, ImageRecipe, Spec
from cache_store.shard_builder import OtherShardError, Outcome, ShardBuilder
from precompute.encoders.encoder import Encoder
from precompute.image_changes import OtherShard, other_shard
from precompute.images import MID_GREY, content_sha256, decode_image, fit_image, to_pixels
from precompute.rejects import Rejected
from precompute.sources import Source
from precompute.sources.archive import MISSING

BATCHES_AHEAD = 3
"""Decoded batches that wait for the encoder; with one being encoded and two being written, memory's bound."""

WRITES_BEHIND = 2

VERSIONED = ("torch", "diffusers", "numpy", "pillow", "pyarrow")


@dataclass(frozen=True)
class Progress:
    """What one step of the pipeline did."""

    samples: int = 0
    waited_s: float = 0.0
    """Time that the encoder had nothing to do but wait for images."""
    elapsed_s: float = 0.0
    committed: CommitRecord | None = None
    other: OtherShard | None = None
    """A shard that is not committed, because it is not the one that was expected."""


class Batch:
    """A planned batch: images decode into it from several threads, each into its own place."""

    def __init__(self, spec: Spec, planned: pa.Table, shard: int, start: int, stop: int) -> None:
        recipe = spec.arrays[LATENTS].image
        latent_height, latent_width = spec.arrays[LATENTS].shape[1:]
        self.shard, self.planned, self.start, self.stop = shard, planned, start, stop
        count = stop - start
        self.pixels_NYX3 = np.full((count, recipe.height, recipe.width, 3), MID_GREY, np.uint8)
        self.rgb_Nhw3 = np.full((count, latent_height, latent_width, 3), MID_GREY, np.uint8)
        self.outcomes: list[Future[Outcome]] = []
        self.encoding_since = 0.0
        """When the encoder got it, by the monotonic clock."""

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return bool(self.stop == self.planned.num_rows)

    def decode(self, pool: ThreadPoolExecutor, source: Source, recipe: ImageRecipe) -> Self:
        """Start decoding; `wait` until it is done."""
        uris = self.planned["uri"].slice(self.start, self.stop - self.start).to_pylist()
        for place, uri in enumerate(uris):
            self.outcomes.append(pool.submit(self._decode_one, place, source, uri, recipe))
        return self

    def _decode_one(self, place: int, source: Source, uri: str, recipe: ImageRecipe) -> Outcome:
        digest: str | None = None
        size: tuple[int, int] | tuple[None, None] = (None, None)
        try:
            data = source.read(uri)
            digest = content_sha256(data)
            image = decode_image(data, recipe.max_pixels)
            size = image.size
            fitted = fit_image(image, recipe)
        except Rejected as rejected:
            return Outcome(content_sha256=digest, width=size[0], height=size[1], reason=rejected.reason)
        height, width = self.rgb_Nhw3.shape[1:3]
        self.pixels_NYX3[place] = to_pixels(fitted)
        self.rgb_Nhw3[place] = to_pixels(fitted.reduce((fitted.width // width, fitted.height // height)))
        return Outcome(content_sha256=digest, width=size[0], height=size[1], reason=None)

    @property
    def is_ready(self) -> bool:
        return all(future.done() for future in self.outcomes)

    def wait(self) -> list[Outcome]:
        return [future.result() for future in self.outcomes]


class ShardSink:
    """Receives encoded batches in order, on one thread, and makes shards of them."""

    def __init__(
        self,
        root: Path,
        spec: Spec,
        device: str,
        expected: Mapping[int, Collection[str]],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._root, self._spec, self._device = root, spec, device
        self._expected, self._on_progress = expected, on_progress
        self._shard = ExitStack()
        self._failed = False

    def write(self, batch: Batch, latent_NCHW: torch.Tensor) -> None:
        """Add a batch; after a failure the batches already queued behind it are ignored."""
        if self._failed:
            return
        self._failed = True
        self._write(batch, latent_NCHW)
        self._failed = False

    def _write(self, batch: Batch, latent_NCHW: torch.Tensor) -> None:
        if batch.is_first:
            self._started = batch.encoding_since
            expected = self._expected.get(batch.shard, ())
            builder = ShardBuilder(self._root, self._spec, LATENTS, batch.shard, batch.planned, expected)
            self._builder = self._shard.enter_context(builder)
        rgb = batch.rgb_Nhw3.astype(np.float32) / 255.0
        self._builder.append(latent_NCHW.cpu().numpy(), rgb, batch.wait())
        if batch.is_last:
            done = self._commit(batch.shard)
            self._shard.close()
            self._on_progress(done)

    def _commit(self, shard: int) -> Progress:
        """A shard that is not the expected one is told and left out; others may yet be."""
        seconds = time.monotonic() - self._started
        try:
            return Progress(committed=self._builder.commit(seconds, self._device, library_versions()))
        except OtherShardError as error:
            return Progress(other=other_shard(self._root, shard, error))

    def close(self) -> None:
        """Drop a shard that is not committed."""
        self._shard.close()


@cache
def library_versions() -> dict[str, str]:
    """Of the libraries that a latent's bits may depend on."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def planned_batches(root: Path, spec: Spec, shards: Iterable[int]) -> Iterator[Batch]:
    """Every batch of the given shards, in order, not yet decoded."""
    size = spec.arrays[LATENTS].encoder.batch_size
    plan = PlanFile(root)
    for shard in shards:
        planned = plan.shard(shard)
        for start in range(0, planned.num_rows, size):
            yield Batch(spec, planned, shard, start, min(start + size, planned.num_rows))


def decoded_batches(
    batches: Iterator[Batch], pool: ThreadPoolExecutor, source: Source, recipe: ImageRecipe
) -> Iterator[Batch]:
    """The same batches, decoded, a few ahead of whoever asks."""
    ahead: deque[Batch] = deque()
    for batch in batches:
        ahead.append(batch.decode(pool, source, recipe))
        if len(ahead) > BATCHES_AHEAD:
            yield ahead.popleft()
    yield from ahead


def refuse_vanished(batch: Batch, source: Source) -> None:
    """SourceError for an image that is gone since it was planned: a mount that went is no fault of the sample."""
    planned = batch.planned.slice(batch.start, batch.stop - batch.start)
    columns = (planned[name].to_pylist() for name in ("id", "uri", "fingerprint"))
    for outcome, name, uri, fingerprint in zip(batch.wait(), *columns, strict=True):
        if outcome.content_sha256 is None and fingerprint != MISSING and source.fingerprint(uri) == MISSING:
            raise SourceError(
                f"the image of {name} was there when the cache was planned and is gone ({outcome.reason}); restore "
                "the images and run the same command again"
            )


def encode_shards(
    root: Path,
    spec: Spec,
    source: Source,
    encoder: Encoder,
    shards: Iterable[int],
    expected: Mapping[int, Collection[str]],
    *,
    decode_threads: int,
    stop: threading.Event,
    on_progress: Callable[[Progress], None],
) -> None:
    """Build the given shards; Interrupted, with the shard in hand dropped, once `stop` is set.

    A shard that does not come out as `expected` leaves what was there, and the others are built all the same.
    """
    sink = ShardSink(root, spec, str(encoder.device), expected, on_progress)
    writes: deque[Future[None]] = deque()
    decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
    writer = ThreadPoolExecutor(1, thread_name_prefix="write")
    try:
        batches = decoded_batches(planned_batches(root, spec, shards), decoders, source, spec.arrays[LATENTS].image)
        for batch, waited_s, elapsed_s in timed(batches, encoder.device):
            if stop.is_set():
                raise Interrupted("the shard in hand was dropped; run the same command again to go on")
            refuse_vanished(batch, source)
            batch.encoding_since = time.monotonic()
            latents = encoder.encode(torch.from_numpy(batch.pixels_NYX3))
            writes.append(writer.submit(sink.write, batch, latents))
            while len(writes) > WRITES_BEHIND:
                writes.popleft().result()
            on_progress(Progress(len(batch.pixels_NYX3), waited_s, elapsed_s))
        for write in writes:
            write.result()
    finally:
        decoders.shutdown(cancel_futures=True)
        writer.shutdown(cancel_futures=True)
        sink.close()


def timed(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Batch, float, float]]:
    """Each batch with the time that the encoder stood idle for it, and the time since the one before it."""
    last = time.monotonic()
    for batch in batches:
        if not batch.is_ready and device.type == "cuda":
            torch.cuda.synchronize(device)  # an encoder still at work does not wait yet
        idle = time.monotonic()
        batch.wait()
        now = time.monotonic()
        yield batch, now - idle, now - last
        last = now
