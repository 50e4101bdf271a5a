"""A worker's body, whichever engine started it: load the encoder, build the shards that come, say what happened."""

import threading
from collections.abc import Iterator
from typing import Protocol

import msgspec
import torch

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.format.schema import Spec
from cache_store.log import set_up_log
from cache_store.refusal import differences_between, refuse
from cache_store.storage.calls import abandon_calls_after
from precompute.encode.canary import Canary
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.pipeline import encode_shards
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.sources import open_source

ENCODER_THREADS = 2
"""Of each worker's encoder on a CPU, always: a larger machine has more workers. oneDNN orders some convolutions by the
number of threads (torch 2.13: images of 32 x 40 pixels differ between 1, 2 and 4 threads, of 64 x 128 between 4 and 8),
and bytes must not depend on how many workers share how many cores.
"""

POLL_S = 0.2

GRACE_S = 10.0
"""For a worker to notice that it is to stop: a batch, on a GPU."""

Event = Progress | EncodeOnceError | OSError | None
"""What a worker says; None asks for a shard."""


class Orders(Protocol):
    """A worker's line to whoever hands out shards."""

    stop: threading.Event
    """Set when the worker is to drop the shard in hand."""

    def report(self, event: Event) -> None:
        """Say what happened; called from several threads."""

    def shards(self) -> Iterator[int]:
        """Shards as they are given, each asked for."""


def obey(job: EncodeJob, config: EncoderConfig, decode_threads: int, orders: Orders) -> None:
    """Build shards until none is left, or until told to stop; report a failure that is not ours."""
    set_up_log("precompute")
    torch.set_num_threads(ENCODER_THREADS)
    silence_decoders()
    try:
        encoder = load_encoder(config, job.config.image.range)
        refuse_other_encoder(encoder, job.spec)
        with abandon_calls_after(orders.stop.is_set), Canary(config, job.config.image.range) as canary:
            encode_shards(
                job,
                open_source(job.config.source),
                encoder,
                orders.shards(),
                decode_threads=decode_threads,
                stop=orders.stop,
                on_progress=orders.report,
                canary=canary,
            )
    except Interrupted:
        pass  # whoever hands out shards knows: it told us to stop
    except (EncodeOnceError, OSError) as error:
        orders.report(error)


def refuse_other_encoder(encoder: Encoder, spec: Spec) -> None:
    if encoder.identity != spec.array.encoder:
        planned, loaded = (msgspec.to_builtins(each) for each in (spec.array.encoder, encoder.identity))
        summary = "encoder.model changed while the build was starting"
        refuse(summary, differences_between(planned, loaded), ["run the same command again"], held="when planned")
