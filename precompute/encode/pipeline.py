"""One worker's pipeline: decoding, encoding and writing overlap; memory holds a few batches, the disk whole shards."""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import numpy as np
import torch

from cache_store.cache.writer import MismatchedShardError, ShardBuilder
from cache_store.errors import Interrupted
from cache_store.format.array import ArraySpec
from cache_store.program.gpu_use import GpuMeter
from cache_store.storage.prefetch import keep_ahead
from cache_store.storage.threads import STOP_REQUEST
from precompute.encode.batches import Batch, Decoders, InputBuffers, decoded_batches, planned_batches
from precompute.encode.canary import Canary
from precompute.encode.device_feed import DeviceFeed, Encoding, feed_of
from precompute.encode.job import EncodeJob, MismatchedShard, Progress
from precompute.encoders.encoder import Encoder
from precompute.encoders.hardware import gpu_uuid, hardware_of
from precompute.inputs import make_reader
from precompute.inputs.busy import BusyTimes
from precompute.inputs.reader import Inputs, inputs_of
from precompute.sources.images import Source

WRITES_BEHIND = 2
"""Most encoded batches that wait to be written."""

VERSIONED = ("torch", "diffusers", "transformers", "numpy", "pillow", "pyarrow", "ftfy", "av")


def encode_shards(
    job: EncodeJob,
    source: Source,
    encoder: Encoder,
    runs: Iterable[Iterable[int]],
    *,
    decode_threads: int,
    on_progress: Callable[[Progress], None],
    canary: Canary | None = None,
) -> None:
    """Build runs of shards, each to its end; once a stop is requested, drop unfinished shards and raise Interrupted.

    Reports each batch, and then its shard. A shard with another digest than it must have leaves the old files in
    place. Raises SourceError if an image vanished since planning, DeviceError if the canary refuses the device.
    """
    busy, meter, last = BusyTimes(decode_threads), GpuMeter(gpu_uuid(encoder.device)), time.monotonic()
    feed, reader = feed_of(encoder), make_reader(source, job.spec.array, encoder.texts, busy=busy)
    sink = ShardSink(job, encoder.device, busy, canary, on_progress, feed.buffers)
    decoders = Decoders(decode_threads)

    def report(shard: int | None = None, samples: int = 0) -> None:
        nonlocal last
        since, last = last, time.monotonic()
        on_progress(Progress(shard, samples, last - since, busy.take(), gpu_use=meter.take()))

    def writes(shards: Iterable[int]) -> Iterator[Future[None]]:
        """Give each batch to the encoder, and then to the sink."""
        planned = planned_batches(reader, job.store, job.spec, shards, feed.buffers.take)
        for batch in decoded_batches(planned, decoders, busy):
            batch.wait()
            if STOP_REQUEST.is_set():
                raise Interrupted("the unfinished shard was dropped; run the same command again to go on")
            batch.refuse_vanished()
            batch.encoding_since = time.monotonic()
            encoding, null_text = encode_batch(feed, batch), None
            if reader.null_inputs is not None and (batch.shard, batch.start) == (0, 0):
                null_text = encode_null_text(feed, batch.array, reader.null_inputs)
            report(batch.shard, len(batch.inputs))
            yield sink.write(batch, encoding, null_text)

    try:
        for shards in runs:
            for begun in keep_ahead(writes(shards), WRITES_BEHIND):
                begun.result()
            sink.finish()
            report()
    finally:
        meter.close()
        decoders.shutdown(cancel_futures=True)
        sink.close()


def encode_batch(feed: DeviceFeed, batch: Batch) -> Encoding:
    if all(outcome.reason is not None for outcome in batch.wait()):
        zeros = np.zeros((len(batch.inputs), *batch.array.shape), np.float32)
        return lambda: (zeros, 0.0)
    return feed.encode(batch.array, batch.buffer, len(batch.inputs))


def encode_null_text(feed: DeviceFeed, array: ArraySpec, null_inputs: Inputs) -> Encoding:
    """Give the null prompt to the device, in a batch of its own, so that its bits depend on no other text."""
    buffer = feed.buffers.take(array)
    buffer[0] = inputs_of(array).filler
    buffer[0, : len(null_inputs)] = null_inputs
    return feed.encode(array, buffer, 1)


class ShardSink:
    """Makes shards of batches, which arrive in order, on a thread; another one commits the shard before."""

    def __init__(
        self,
        job: EncodeJob,
        device: torch.device,
        busy: BusyTimes,
        canary: Canary | None,
        on_progress: Callable[[Progress], None],
        buffers: InputBuffers,
    ) -> None:
        self._job, self._device, self._busy, self._canary = job, device, busy, canary
        self._on_progress, self._buffers = on_progress, buffers
        self._is_compiled = job.spec.array.encoder.path == "folded" and job.config.encoder.compiles
        """Recorded, because bits may depend on it, and `encoder.compile: auto` depends on the machine."""
        self._shard = ExitStack()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._write_before: Future[None] | None = None
        self._commit: Future[None] | None = None

    def write(self, batch: Batch, encoding: Encoding, null_text: Encoding | None) -> Future[None]:
        self._write_before = self._writer.submit(self._write, batch, encoding, null_text, self._write_before)
        return self._write_before

    def _write(self, batch: Batch, encoding: Encoding, null_text: Encoding | None, before: Future[None] | None) -> None:
        samples, seconds = encoding()  # also frees the device's memory
        null_NF = None if null_text is None else null_text()[0]
        self._busy.add("encoding", seconds)
        if before:
            before.result()  # if a write before failed, the shard is incomplete
        if self._commit and self._commit.done():
            self.finish()
        with self._busy.measured("writing"):
            self._append(batch, samples, None if null_NF is None else null_NF[0])
        if batch.stop == batch.planned.num_rows:
            self.finish()
            seconds = time.monotonic() - self._started
            self._commit = self._committer.submit(self._commit_shard, self._builder, self._shard.pop_all(), seconds)
        self._buffers.give_back(batch.buffer)

    def _append(self, batch: Batch, samples: np.ndarray, null_text: np.ndarray | None) -> None:
        if batch.start == 0:
            self._started = batch.encoding_since
            digest = self._job.digests.get(batch.shard, "")
            job, shard, planned = self._job, batch.shard, batch.planned
            shared = job.shared or shard in job.never_replace
            builder = ShardBuilder(job.store, job.spec, shard, planned, digest, shared=shared)
            self._builder = self._shard.enter_context(builder)
        outcomes = batch.wait()
        if self._canary and self._canary.wants_samples:
            good = [place for place, outcome in enumerate(outcomes) if outcome.reason is None]
            self._canary.begin(batch.inputs, samples, good, batch.array)
        self._builder.append(samples, batch.preview_rgb, outcomes)
        if null_text is not None:
            self._builder.add_null_text(null_text)

    def _commit_shard(self, builder: ShardBuilder, shard: ExitStack, seconds: float) -> None:
        """Commit the shard; if its digest is another than it must be, report that in place of a commit."""
        with shard:
            if self._canary:
                self._canary.refuse_wrong_device(self._device)
            try:
                hardware = hardware_of(self._device)
                if self._is_compiled:
                    hardware = {**hardware, "encoder": "compiled"}
                record = builder.commit(seconds, str(self._device), library_versions(), hardware)
                done = Progress(record.content.shard, committed=record, is_others=builder.is_others)
            except MismatchedShardError as error:
                samples = error.samples.select(["id", "content_sha256", "status", "reason"])
                mismatched = MismatchedShard(shard=error.shard, digest=error.digest, samples=samples)
                done = Progress(error.shard, mismatched=mismatched)
        self._on_progress(done)

    def finish(self) -> None:
        """Wait for the running commit, if any, and raise its error."""
        if commit := self._commit:
            self._commit = None
            if self._canary:
                with self._busy.measured("checking"):
                    self._canary.wait()
            with self._busy.measured("writing"):
                commit.result()

    def close(self) -> None:
        self._writer.shutdown(cancel_futures=True)
        self._committer.shutdown()
        self._shard.close()


@cache
def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a sample's bits may depend on, as far as they are installed."""
    installed = (name for name in VERSIONED if any(importlib.metadata.distributions(name=name)))
    return {name: importlib.metadata.version(name) for name in installed}
