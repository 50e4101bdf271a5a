"""Our side of `benchmarks.feed`: the build, the encoder alone, decoding alone, and CPU time by part."""

# Axes: N images of a batch, Y X pixels, 3 RGB.

import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import precompute.encode.batches as batches
from benchmarks.feed_stand_in import FeedJob, SleepingEncoder, StandIn
from cache_store.cache.metadata import read_spec
from cache_store.cache.writer import ShardBuilder
from cache_store.format.sums import RunningSums
from cache_store.program.running import usable_cores
from cache_store.storage.store import open_store
from precompute.config import BuildConfig
from precompute.encode.batches import Decoders, decoded_batches, planned_batches
from precompute.encode.device_feed import SLOTS, Encoding, StreamedEncoding, StreamedFeed
from precompute.encode.job import Progress
from precompute.encode.local_engine import crew_of, run_local
from precompute.encoders.registry import load_encoder
from precompute.rerun.request import BuildRequest
from precompute.rerun.steps import plan_for_ranks
from precompute.sources import open_source

ALONE_BATCHES = 60
"""Most batches that time the encoder alone."""


class Feed:
    """A build around the stand-in, planned anew for each run."""

    def __init__(self, config: BuildConfig, encoder_ms: float, *, is_stubbed: bool) -> None:
        self.config, image = config, config.image
        self.stand_in = StandIn(
            folder=config.encoder.model,
            encoder_ms=encoder_ms,
            height=image.height,
            width=image.width,
            is_stubbed=is_stubbed,
        )
        self.stand_in.save()
        self._plan()
        spec = read_spec(self._store)
        self.samples, self.workers = spec.rows, crew_of(config, spec.num_shards).workers
        self.stand_in = replace(self.stand_in, workers=self.workers)
        self.stand_in.save()
        self.source = open_source(config.source)

    def _plan(self) -> None:
        shutil.rmtree(self.config.cache, ignore_errors=True)
        plan_for_ranks(self.config, BuildRequest())
        self._store = open_store(self.config.cache)

    @property
    def paths(self) -> list[str]:
        """Paths of the images, in row order."""
        rows = open_source(self.config.source).samples()
        return [str(Path(str(self.config.source.images), str(row["uri"]))) for row in rows]

    @property
    def encoder(self) -> SleepingEncoder:
        return SleepingEncoder(self.stand_in, self.config.encoder)

    def build(self, config: BuildConfig | None = None, shards: int | None = None) -> float:
        """Build, and return the seconds from the first image to the last commit."""
        self._plan()
        config = config or self.config
        encoder = load_encoder(config.encoder, config.image.range)
        self.stand_in.forget()
        if self.workers == 1:
            self.stand_in.stamp("loaded")
        spec, ends = read_spec(self._store), []

        def on_progress(progress: Progress) -> None:
            if progress.committed:
                ends.append(time.monotonic())

        job = FeedJob(config=config, store=self._store, spec=spec, shards=range(spec.num_shards)[:shards])
        run_local(job, self.source, encoder, threading.Event(), on_progress)
        return ends[-1] - self.stand_in.began

    def encoder_alone(self) -> float:
        """Return the encoder's seconds for all samples, from a few batches; 0 if it takes no time."""
        if not self.stand_in.encoder_ms:
            return 0.0
        size, array = self.config.encoder.batch_size, read_spec(self._store).array
        feed, count = self.encoder.feed(array), -(-self.samples // size)
        number, room, ahead = min(count, ALONE_BATCHES), feed.rooms.take(), deque[Encoding]()
        started = time.monotonic()
        for _ in range(number):
            ahead.append(feed.encode(room, size))
            if len(ahead) == SLOTS:
                ahead.popleft().samples()
        for each in ahead:
            each.samples()
        return (time.monotonic() - started) / number * count

    def decoding_alone(self) -> float:
        """Return the seconds to read, hash, decode and fit all samples, in as many threads as there are cores."""
        spec, started = read_spec(self._store), time.monotonic()
        with Decoders(usable_cores()) as pool:
            for batch in decoded_batches(planned_batches(self._store, spec, range(spec.num_shards)), pool, self.source):
                batch.wait()
        return time.monotonic() - started

    def cpu_us_of_parts(self, samples: int) -> dict[str, float]:
        """Return processor microseconds per image by part, in one process; the rest is handing over."""
        run = replace(self.config.run, workers=1)
        shards = max(1, samples // self.config.store.samples_per_shard)
        workers, self.workers = self.workers, 1
        with measured_parts(self.source) as seconds:
            started = time.process_time()
            self.build(replace(self.config, run=run), shards)
            whole = time.process_time() - started - seconds.pop("planning")
        self.workers = workers
        done = min(self.samples, shards * self.config.store.samples_per_shard)
        parts = {**seconds, "handing over and the rest": whole - sum(seconds.values()), "all": whole}
        return {name: round(each / done * 1e6, 1) for name, each in parts.items()}


@contextmanager
def measured_parts(source: Any) -> Iterator[Counter[str]]:
    """Yield this process's processor seconds by part; a part within another counts only there."""
    seconds, inside = Counter[str](), threading.local()

    def measure(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            outer, inside.seconds = getattr(inside, "seconds", 0.0), 0.0
            started = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.thread_time() - started
                seconds[part] += taken - inside.seconds
                inside.seconds = outer + taken

        return measured

    places: dict[str, list[tuple[Any, str]]] = {
        "planning": [(Feed, "_plan")],
        "read": [(source, "read")],
        "hash": [(batches, "content_sha256")],
        "decode": [(batches, "decode_image")],
        "fit": [(batches, "fit_image"), (batches, "write_pixels")],
        "encoder": [(StreamedFeed, "encode"), (StreamedEncoding, "samples")],
        "statistics": [(RunningSums, "round_and_add")],
        "sample writing": [(ShardBuilder, "append")],
        "commit": [(ShardBuilder, "commit")],
    }
    held = [(place, name, getattr(place, name)) for each in places.values() for place, name in each]
    try:
        for part, each in places.items():
            for place, name in each:
                setattr(place, name, measure(getattr(place, name), part))
        yield seconds
    finally:
        for place, name, function in held:
            setattr(place, name, function)
