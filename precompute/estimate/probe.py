"""Measure real batches: decoding alone, encoding alone, and both at once, as one worker of a build does.

Each measurement takes a third of the time. Its clock starts after the first batch, which warms up and fills the queues.
"""

# Axes: N images of a batch, Y X pixels, 3 RGB.

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pyarrow as pa
import torch

from cache_store.errors import SourceError
from cache_store.format.schema import Spec
from cache_store.format.tables import reason_kind
from cache_store.program.progress_bar import ProgressBar
from precompute.encode.batches import BATCHES_AHEAD, Batch, Decoders, decoded_batches
from precompute.encode.device_feed import Encoding, feed_of
from precompute.encoders.encoder import Encoder
from precompute.inputs import make_reader
from precompute.sources.images import Source

KEPT_BATCHES = BATCHES_AHEAD
"""Decoded batches that are kept in memory and encoded repeatedly."""

MEASURED_AT_LEAST = 2
"""Fewest batches to measure after the first, even if the time is over."""

KEPT_SAMPLES = 256
"""Encoded samples kept, to measure how well codecs compress them."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The rates of one worker on this machine."""

    device: str
    made_of: str
    """`image`, `clip` or `text`."""
    decode_threads: int
    decode_per_s: float
    """Samples per second, for all these threads together."""
    encode_per_s: float
    both_per_s: float
    """Samples per second while decoding and encoding run at the same time."""
    waiting_share: float
    """Share of the time that the encoder then waits."""
    seconds: float
    images: int
    """Number of different samples decoded."""
    rejected: Counter[str]
    """Number of rejected samples, by reason."""
    samples: np.ndarray
    """Encoded samples of the first batch's size: [N, *shape], float32."""

    @property
    def shares_cores(self) -> bool:
        """Whether the encoder runs on the cores that decode."""
        return self.device == "cpu"

    @property
    def is_decode_bound(self) -> bool:
        return self.decode_per_s < self.encode_per_s


class Prober:
    """Probes batches of drawn samples, as a worker of a build with that spec would."""

    def __init__(self, spec: Spec, planned: list[pa.Table], source: Source, encoder: Encoder, threads: int) -> None:
        self._spec, self._planned, self._encoder = spec, planned, encoder
        self._threads, self._feed = threads, feed_of(encoder)
        self._reader = make_reader(source, spec.array, encoder.texts)
        self._reasons: dict[int, list[str | None]] = {}
        """Reason of each sample's rejection, or None, by the batch's number."""

    def probe(self, seconds: float) -> Probe:
        """Measure for about this time, with a progress bar."""
        started, samples = time.monotonic(), list[np.ndarray]()
        with ProgressBar("probe", seconds, "s") as bar:

            def show() -> None:
                bar.reach(min(round(time.monotonic() - started, 1), seconds))

            kept = deque[Batch](maxlen=KEPT_BATCHES)
            with self._decoded() as batches:
                decode_per_s, _ = measure_pace(self._decode(batches, kept), seconds / 3, show)
            rejected = self._rejections()
            ready = cycle([(batch, 0.0) for batch in kept])
            encode_per_s, _ = measure_pace(self._encode(ready, []), seconds / 3, show)
            with self._decoded() as batches:
                waited_for = with_waiting(batches, self._encoder.device)
                both_per_s, waited = measure_pace(self._encode(waited_for, samples), seconds / 3, show)
        return Probe(
            device=str(self._encoder.device),
            made_of=self._spec.array.made_of,
            decode_threads=self._threads,
            decode_per_s=decode_per_s,
            encode_per_s=encode_per_s,
            both_per_s=both_per_s,
            waiting_share=waited,
            seconds=time.monotonic() - started,
            images=sum(map(len, self._reasons.values())),
            rejected=Counter(map(reason_kind, rejected)),
            samples=np.concatenate(samples)[:KEPT_SAMPLES],
        )

    @contextmanager
    def _decoded(self) -> Iterator[Iterator[Batch]]:
        """Yield all batches again and again, decoded a few ahead."""
        pool = Decoders(self._threads)
        try:
            numbers = cycle(range(len(self._planned)))
            batches = (Batch(self._reader, self._spec, self._planned[number], number, 0) for number in numbers)
            yield decoded_batches(batches, pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, batches: Iterator[Batch], kept: deque[Batch]) -> Iterator[tuple[int, float]]:
        for batch in batches:
            self._reasons[batch.shard] = [outcome.reason for outcome in batch.wait()]
            kept.append(batch)
            yield len(batch.inputs), 0.0

    def _encode(self, batches: Iterable[tuple[Batch, float]], kept: list[np.ndarray]) -> Iterator[tuple[int, float]]:
        """Encode one batch ahead; yield each batch's size when its samples have arrived, with a waiting time."""
        ahead = deque[Encoding]()
        for batch, waited_s in batches:
            ahead.append(self._feed.encode(batch.array, batch.buffer, len(batch.inputs)))
            if len(ahead) > 1:
                samples, _ = ahead.popleft().samples()
                if sum(map(len, kept)) < KEPT_SAMPLES and samples.shape[1:] == self._spec.array_of(0).shape:
                    kept.append(samples)
                yield len(samples), waited_s

    def _rejections(self) -> list[str]:
        """Return the reasons of rejected samples; raise SourceError if all were rejected."""
        reasons = [reason for each in self._reasons.values() for reason in each]
        rejected = [reason for reason in reasons if reason is not None]
        if len(rejected) == len(reasons):
            raise SourceError(f"all {len(reasons):,} samples drawn would be rejected, such as: {rejected[0]}")
        return rejected


def measure_pace(work: Iterator[tuple[int, float]], seconds: float, show: Callable[[], object]) -> tuple[float, float]:
    """Run `work`, which yields images and seconds waited per batch; return images per second and the waiting share."""
    began, images, waited_s, batches = 0.0, 0, 0.0, 0
    for count, waited in work:
        now = time.monotonic()
        show()
        if not began:
            began = now
            continue
        images, waited_s, batches = images + count, waited_s + waited, batches + 1
        if now - began >= seconds and batches >= MEASURED_AT_LEAST:
            break
    elapsed = max(now - began, 1e-9)
    return images / elapsed, waited_s / elapsed


def with_waiting(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds that the encoder waited for it."""
    for batch in batches:
        if not batch.is_ready and device.type == "cuda":
            torch.cuda.synchronize(device)  # a busy encoder is not waiting yet
        idle = time.monotonic()
        batch.wait()
        yield batch, time.monotonic() - idle
