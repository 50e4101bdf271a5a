"""A worker's body, for every engine: load the encoder, build the shards it is given, report events."""

import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import torch

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.format.schema import Spec
from cache_store.log import set_up_log
from cache_store.messages import differences_between, refuse
from cache_store.storage.daemon_threads import STOP_REQUEST
from precompute.encode.canary import Canary
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.sources import open_source

ENCODER_THREADS = 2
"""Threads of each worker's encoder on a CPU; a larger machine has more workers. oneDNN orders some convolutions by the
number of threads (torch 2.13: images of 32 x 40 pixels differ between 1, 2 and 4 threads, of 64 x 128 between 4 and 8),
and bytes must not depend on how many workers share how many cores.
"""

GRACE_S = 10.0
"""Seconds for a worker to stop: it first finishes a batch."""

Event = Progress | EncodeOnceError | OSError | None
"""A message from a worker; None asks for a shard."""


class WorkerChannel(ABC):
    """A worker's connection to the process that hands out shards."""

    def __init__(self) -> None:
        self._shards = queue.SimpleQueue[int | None]()

    @abstractmethod
    def report(self, event: Event) -> None:
        """Send an event; called from several threads."""

    def give(self, shard: int | None) -> None:
        """Give the worker a shard that it asked for, or None if none is left."""
        self._shards.put(shard)

    def drop(self) -> None:
        """Make the worker drop its unfinished shard and end."""
        STOP_REQUEST.set()
        self._shards.put(None)

    def shards(self) -> Iterator[int]:
        """Ask for shards and yield them, one by one, until none is left."""
        self.report(None)
        while (shard := self._shards.get()) is not None:
            yield shard
            self.report(None)


def run_worker(job: EncodeJob, config: EncoderConfig, decode_threads: int, channel: WorkerChannel) -> None:
    """Build shards until none is left or a stop is requested; report errors other than bugs."""
    set_up_log("precompute")
    torch.set_num_threads(ENCODER_THREADS)
    silence_decoders()
    try:
        encoder = load_encoder(config, job.config.image.range)
        refuse_mismatched_encoder(encoder, job.spec)
        with Canary(config, job.config.image.range) as canary:
            encode_shards(
                job,
                open_source(job.config.source),
                encoder,
                channel.shards(),
                decode_threads=decode_threads,
                stop=STOP_REQUEST,
                on_progress=channel.report,
                canary=canary,
            )
    except Interrupted:
        pass  # nothing to report: we were told to stop
    except (EncodeOnceError, OSError) as error:
        channel.report(error)


def refuse_mismatched_encoder(encoder: Encoder, spec: Spec) -> None:
    """Raise StaleError if the encoder is not the one in the spec, because its files changed since planning."""
    if encoder.identity != spec.array.encoder:
        planned, loaded = (msgspec.to_builtins(each) for each in (spec.array.encoder, encoder.identity))
        summary = "encoder.model changed while the build was starting"
        refuse(summary, differences_between(planned, loaded), ["run the same command again"], held="when planned")
