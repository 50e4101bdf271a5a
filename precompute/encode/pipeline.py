"""One worker's work: decode, encode and write overlap, a few batches in memory, whole shards on disk."""

import importlib.metadata
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import numpy as np
import torch

from cache_store.cache.writing.writer import MismatchedShardError, ShardBuilder
from cache_store.errors import Interrupted
from cache_store.format.schema import Spec
from precompute.encode.batches import Batch, Decoders, decoded_batches, planned_batches, refuse_vanished
from precompute.encode.job import EncodeJob, MismatchedShard, Progress
from precompute.encoders.encoder import Encoder
from precompute.sources import Source

WRITES_BEHIND = 2
"""Encoded batches that wait for the disk."""

VERSIONED = ("torch", "diffusers", "transformers", "numpy", "pillow", "pyarrow")


class ShardSink:
    """Receives encoded batches in order, on one thread, and makes shards of them."""

    def __init__(self, job: EncodeJob, device: str, on_progress: Callable[[Progress], None]) -> None:
        self._job, self._device, self._on_progress = job, device, on_progress
        self._shard = ExitStack()
        self._failed = False

    def write(self, batch: Batch, encoded: torch.Tensor) -> None:
        """Add a batch; after a failure the batches already queued behind it are ignored."""
        if self._failed:
            return
        self._failed = True
        self._write(batch, encoded)
        self._failed = False

    def _write(self, batch: Batch, encoded: torch.Tensor) -> None:
        if batch.start == 0:
            self._started = batch.encoding_since
            allowed = self._job.allowed_digests.get(batch.shard, ())
            job, shard, planned = self._job, batch.shard, batch.planned
            shared = job.shared or shard in job.new
            builder = ShardBuilder(job.store, job.spec, shard, planned, allowed, shared=shared)
            self._builder = self._shard.enter_context(builder)
        rgb = None if batch.rgb_Nhw3 is None else batch.rgb_Nhw3.astype(np.float32) / 255.0
        self._builder.append(encoded.cpu().numpy(), rgb, batch.wait())
        if batch.stop == batch.planned.num_rows:
            done = self._commit()
            self._shard.close()
            self._on_progress(done)

    def _commit(self) -> Progress:
        """Report a shard that does not match and skip it; others may yet."""
        seconds = time.monotonic() - self._started
        try:
            return Progress(committed=self._builder.commit(seconds, self._device, library_versions()))
        except MismatchedShardError as error:
            samples = error.samples.select(["id", "content_sha256", "status", "reason"])
            return Progress(mismatched=MismatchedShard(shard=error.shard, digest=error.digest, samples=samples))

    def close(self) -> None:
        """Drop a shard that is not committed."""
        self._shard.close()


@cache
def library_versions() -> dict[str, str]:
    """Of the libraries that a sample's bits may depend on."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def encode_shards(
    job: EncodeJob,
    source: Source,
    encoder: Encoder,
    shards: Iterable[int],
    *,
    decode_threads: int,
    stop: threading.Event,
    on_progress: Callable[[Progress], None],
) -> None:
    """Build these shards of the job; Interrupted, with the shard in hand dropped, once `stop` is set.

    A shard whose digest is not among those allowed leaves what was there, and the others are built all the same.
    """
    sink = ShardSink(job, str(encoder.device), on_progress)
    writes: deque[Future[None]] = deque()
    decoders = Decoders(decode_threads)
    writer = ThreadPoolExecutor(1, thread_name_prefix="write")
    try:
        batches = decoded_batches(planned_batches(job.store, job.spec, shards), decoders, source)
        for batch, waited_s, elapsed_s in timed(batches, encoder.device):
            if stop.is_set():
                raise Interrupted("the shard in hand was dropped; run the same command again to go on")
            refuse_vanished(batch, source)
            batch.encoding_since = time.monotonic()
            encoded = encode_batch(encoder, batch, job.spec)
            writes.append(writer.submit(sink.write, batch, encoded))
            while len(writes) > WRITES_BEHIND:
                writes.popleft().result()
            on_progress(Progress(len(batch.pixels_NYX3), waited_s, elapsed_s))
        for write in writes:
            write.result()
    finally:
        decoders.shutdown(cancel_futures=True)
        writer.shutdown(cancel_futures=True)
        sink.close()


def encode_batch(encoder: Encoder, batch: Batch, spec: Spec) -> torch.Tensor:
    """Encode a decoded batch; zeros where every image was rejected, of which nothing is kept."""
    if all(outcome.reason is not None for outcome in batch.wait()):
        return torch.zeros(len(batch.pixels_NYX3), *spec.array.shape)
    return encoder.encode(torch.from_numpy(batch.pixels_NYX3))


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
