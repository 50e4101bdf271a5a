"""`precompute estimate`: measure a worker's pace, and compute hours, bytes, dollars and the break-even from it.

Real batches of a random draw of the source are encoded, and written into memory. Each size of a cache is measured for
its share of the time. The clock starts after its first batch, which warms up and fills the queues.

A training that encodes in its loop decodes ahead of its steps, and one from a cache reads ahead: the slower activity
sets the pace. Encoding and the training step take turns on the GPU.
"""

import hashlib
import io
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import ceil
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.cache.writer import encoded_rows, scaled
from cache_store.errors import SourceError
from cache_store.format.array import CodecName, Size
from cache_store.format.formats import FORMATS, shard_format
from cache_store.format.schema import Part, Recipe, SizedArray, Spec, even_shards
from cache_store.format.sums import RunningSums
from cache_store.format.tables import reason_kind
from cache_store.messages import align_rows, counted, shown_time
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.prefetch import keep_ahead
from precompute.build.decide import refuse_impossible
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.request import BuildRequest
from precompute.build.steps import open_build_inputs
from precompute.config import EstimateConfig
from precompute.encode.batches import Batch, Decoders, decoded_batches
from precompute.encode.crew import crew_of
from precompute.encode.device_feed import Encoding, feed_of
from precompute.encode.job import REMEDIES, slowest
from precompute.encode.pipeline import WRITES_BEHIND, encode_batch
from precompute.encode_images import encoder_threads
from precompute.inputs import make_reader
from precompute.inputs.busy import BusyTimes
from precompute.sources.tables import make_table

RUN_SAMPLES = 256
"""Samples drawn in one piece, because a build reads neighbours and some sources read them together."""
KEPT_RUNS = 64
"""Runs kept from a long list; only the fastest GPUs need more, and they encode some again."""

MEASURED_AT_LEAST = 2
"""Fewest batches of a size to measure after the first, even if the time is over."""

KEPT_SAMPLES = 256
"""Encoded samples kept, to measure how well codecs compress them."""

NO_PLAN = "0" * 64

HOUR_S = 3_600.0
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}

WORKERS = (1, 4, 8, 64)

TRAININGS = (1.0, 1 / 3, 0.1)
"""Speeds of training that are shown if none is known, as shares of the encoder's."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The pace of one worker on this machine, and the size of what it writes."""

    spec: Spec
    """The cache's spec; its plan digest is a placeholder."""
    encoded: int
    """Number of different samples encoded."""
    rejected: Mapping[str, int]
    """Number of rejected samples among them, by reason."""
    device: str
    threads: int
    """Threads that decode."""
    sample_s: float
    """Seconds that the worker took for a sample."""
    busy_s: Mapping[Any, float]
    """Seconds for a sample that each part of the worker was busy; parts work at the same time."""
    stored_bytes: Mapping[CodecName, float]
    """Bytes of a sample in its shard's file."""
    free: int | None
    """Free bytes at the cache's location; None if unknown."""

    @property
    def read_s(self) -> float:
        return self.busy_s.get("source", 0.0) + self.busy_s["decoding"]

    @property
    def sample_bytes(self) -> float:
        """Bytes of a sample with the chosen codec; tables and records take some 100 more."""
        return self.stored_bytes[self.spec.array.codec]

    @property
    def fits(self) -> bool:
        return self.free is None or self.sample_bytes * self.spec.rows <= self.free


def measure(config: EstimateConfig) -> Measured:
    """Measure one worker of a build here; refuse what `build` refuses, and a draw without any good sample."""
    inputs = open_build_inputs(config, BuildRequest())
    listed = inputs.reader.samples(inputs.source.samples())
    count, drawn = draw(listed, config.encoder.batch_size)
    if not drawn:
        raise SourceError("; ".join(filter(None, [f"source.path: {config.source.path} holds no samples", listed.note])))
    by_size = defaultdict[Size, list[pa.Table]](list)
    for shard, size in make_arranger(inputs)(make_table(drawn, listed.extra, config.source.path)):
        by_size[size].append(shard)
    arrays, tables = [*map(inputs.array_of, by_size)], [*map(pa.concat_tables, by_size.values())]
    spec = spec_of(inputs.recipe, arrays, [max(1, each.num_rows * count // len(drawn)) for each in tables])
    refuse_impossible(spec)
    threads = config.run.threads(crew_of(config, spec.num_shards)[1])
    one_shard = msgspec.structs.replace(inputs.recipe, samples_per_shard=len(drawn))  # holds all drawn rows of a size
    probe = Probe(inputs, spec_of(one_shard, arrays, [each.num_rows for each in tables]), tables, threads)
    with encoder_threads():
        times = probe.run(config.seconds)
    reasons = [*chain(*probe.reasons.values())]
    if len(rejected := [reason for reason in reasons if reason is not None]) == len(reasons):
        raise SourceError(f"all {len(rejected):,} samples drawn would be rejected, such as: {rejected[0]}")
    return Measured(
        spec=spec,
        encoded=len(reasons),
        rejected=Counter(map(reason_kind, rejected)),
        device=str(inputs.encoder.device),
        threads=threads,
        sample_s=max(times.pop("worker"), *times.values()),  # over few batches, a part may seem slower than the whole
        busy_s=times,
        stored_bytes=probe.stored_bytes(),
        free=inputs.store.free_bytes(),
    )


def draw(samples: Iterable[Mapping[str, Any]], batch_size: int, seed: int = 0) -> tuple[int, list[Mapping[str, Any]]]:
    """Read all samples once; return their number and runs of neighbours, drawn at random with equal chances."""
    generator, runs, count, listed = random.Random(seed), list[list[Mapping[str, Any]]](), 0, iter(samples)
    length = -(-RUN_SAMPLES // batch_size) * batch_size
    with ProgressBar("list", None, "sample") as bar:
        for number, run in enumerate(iter(lambda: [*islice(listed, length)], [])):
            count += len(run)
            bar.update(len(run))
            place = generator.randint(0, number)  # Vitter's algorithm R, which also shuffles the first runs
            if number < KEPT_RUNS:
                runs.insert(place, run)
            elif place < KEPT_RUNS:
                runs[place] = run
    return count, [*chain(*runs)]


def spec_of(recipe: Recipe, arrays: Sequence[SizedArray], counts: Sequence[int]) -> Spec:
    """Make the spec of a cache with so many rows of each array; the plan's digest is a placeholder."""
    each = zip(counts, arrays, strict=True)
    runs = [even_shards(count, recipe.samples_per_shard, array.size.name) for count, array in each]
    part = Part(rows=sum(counts), shards=sum(run.shards for run in chain(*runs)), digest=NO_PLAN)
    return recipe.spec([part], [*chain(*runs)], arrays)


class Probe:
    """A worker that encodes drawn samples as a build does, and writes them into memory."""

    def __init__(self, inputs: BuildInputs, spec: Spec, tables: Sequence[pa.Table], threads: int) -> None:
        """Take the planned rows of each array; in `spec`, each array has one shard."""
        self._spec, self._tables, self._feed = spec, tables, feed_of(inputs.encoder)
        self._busy, self._decoders = BusyTimes(threads), Decoders(threads)
        self._reader = make_reader(inputs.source, spec.array, inputs.encoder.texts, busy=self._busy)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._kept: list[tuple[Batch, np.ndarray]] = []
        self.reasons: dict[tuple[int, int], list[str | None]] = {}
        """Why each sample of a batch is rejected, or None, by the batch's shard and first row."""

    def run(self, seconds: float) -> dict[Any, float]:
        """Return the seconds a sample for which each part was busy, and those of the whole `worker`.

        Common sizes come first; sizes that the time does not reach are assumed to be as fast.
        """
        started, covered, totals = time.monotonic(), 0, defaultdict[Any, float](float)
        try:
            with ProgressBar("probe", seconds, "s") as bar:
                for shard in sorted(range(len(self._tables)), key=lambda each: -self._tables[each].num_rows):
                    rows = self._tables[shard].num_rows
                    for part, spent in self._times_of(shard, seconds * rows / self._spec.rows, bar).items():
                        totals[part] += spent * rows
                    covered += rows
                    if time.monotonic() - started > seconds:
                        break
        finally:
            self._decoders.shutdown(cancel_futures=True)
            self._writer.shutdown()
        return {part: total / covered for part, total in totals.items()}

    def _times_of(self, shard: int, seconds: float, bar: ProgressBar) -> dict[Any, float]:
        """Measure batches of one size for these seconds or longer."""
        began, samples, shown = 0.0, 0, bar.n
        for number, written in enumerate(keep_ahead(self._encoded(shard), WRITES_BEHIND)):
            count, now = written.result(), time.monotonic()
            if not number:
                began = now
                self._busy.take()
                continue
            samples += count
            bar.reach(shown + min(round(now - began, 1), seconds))
            if now - began >= seconds and number >= MEASURED_AT_LEAST:
                break
        times: dict[Any, float] = {**self._busy.take(), "worker": now - began}
        return {part: spent / samples for part, spent in times.items()}

    def _encoded(self, shard: int) -> Iterator[Future[int]]:
        """Encode the full batches of a size in random order, again and again; yield the writing of each as a future."""
        planned, size = self._tables[shard], self._spec.array.encoder.batch_size
        starts = [*range(0, planned.num_rows - size + 1, size)] or [0]
        random.Random(0).shuffle(starts)
        array, take = self._spec.array_of(shard), self._feed.buffers.take
        batches = (Batch(self._reader, self._spec, planned, shard, start, take(array)) for start in cycle(starts))
        for batch in decoded_batches(batches, self._decoders, self._busy):
            self.reasons[shard, batch.start] = [outcome.reason for outcome in batch.wait()]
            yield self._writer.submit(self._write, batch, encode_batch(self._feed, batch))

    def _write(self, batch: Batch, encoding: Encoding) -> int:
        samples, seconds = encoding()
        self._busy.add("encoding", seconds)
        with self._busy.measured("writing"):
            _, raw = written_bytes(self._spec, batch, samples)
        if raw and sum(len(each) for _, each in self._kept) < KEPT_SAMPLES:
            self._kept.append((batch, samples))
        self._feed.buffers.give_back(batch.buffer)
        return len(samples)

    def stored_bytes(self) -> dict[CodecName, float]:
        """Return the bytes of a sample by codec; all sizes are assumed to compress as well as the kept samples."""
        spec, found = self._spec, dict[CodecName, float]()
        for codec in get_args(CodecName):
            if not FORMATS[spec.store_format].unsupported(spec.array.dtype, codec):
                replaced = msgspec.structs.replace(spec, array=msgspec.structs.replace(spec.array, codec=codec))
                each = [written_bytes(replaced, *kept) for kept in self._kept]
                written, raw = map(sum, zip(*each, strict=True))
                found[codec] = written / raw * spec.sample_bytes / spec.rows
        return found


def written_bytes(spec: Spec, batch: Batch, samples: np.ndarray) -> tuple[int, int]:
    """Write a batch as a build does, into memory; return the bytes of its samples, and those before compression."""
    outcomes, array, stream = batch.wait(), spec.array_of(batch.shard), io.BytesIO()
    wanted = np.array([outcome.reason is None for outcome in outcomes], np.bool_)
    rounded = RunningSums(array).round_and_add(samples, wanted, batch.preview_rgb)
    writer = shard_format(spec).writer(stream, batch.shard, batch.samples)
    writer.append(encoded_rows(array, rounded, scaled(outcomes, rounded)))
    hashlib.sha256(stream.getbuffer())
    return stream.tell(), int(rounded.kept.sum()) * array.sample_bytes


def estimate_lines(config: EstimateConfig, found: Measured) -> Iterator[str]:
    """Yield the estimate of a build, and of trainings of the config's speed if it has one."""
    spec, noun, limit = found.spec, found.spec.array.made_of, slowest(found.busy_s)
    assert limit is not None, "a worker has parts"
    yield f"{counted(spec.rows, 'sample')}; {found.encoded:,} drawn at random and encoded"
    if found.rejected:
        yield "rejected among these: " + ", ".join(f"{count:,} {why}" for why, count in sorted(found.rejected.items()))
    cores = ceil(found.read_s / found.busy_s["encoding"] * found.threads)
    decoding = f"{counted(found.threads, 'thread')}; {counted(cores, 'core')} would keep the encoder busy"
    notes = {"decoding": decoding, "encoding": found.device, "writing": "without the disk"}
    rows = [("a worker", per_s(found.sample_s, noun), f"bound by {limit}: {REMEDIES[limit]}")]
    parts = [part for part in REMEDIES if found.busy_s.get(part)]
    rows += [(part, per_s(found.busy_s[part], noun), notes.get(part, "")) for part in parts]
    yield from ("", *align_rows(rows), "")
    build_s = spec.rows * found.sample_s  # equal workers share whole shards
    times = (shown_time(build_s * ceil(spec.num_shards / workers) / spec.num_shards) for workers in WORKERS)
    yield from align_rows([("workers", *map(str, WORKERS)), ("build", *times)])
    if (price := config.dollars_per_gpu_hour) is not None:
        whole, million = (seconds / HOUR_S * price for seconds in (build_s, 1e6 * found.sample_s))
        yield f"${whole:,.2f} of GPUs, ${million:,.2f} a million {noun}s"
    rows = [("codec", "bytes a sample", "whole cache")]
    for codec, size in found.stored_bytes.items():
        rows.append((codec + " (chosen)" * (codec == spec.array.codec), f"{size:,.0f}", shown_bytes(size * spec.rows)))
    yield from ("", *align_rows(rows))
    free = "unknown" if found.free is None else shown_bytes(found.free)
    yield f"free at {config.cache}: {free}{'' if found.fits else ': too little'}"
    speeds = [config.samples_per_s or share * config.gpus / found.busy_s["encoding"] for share in TRAININGS]
    trainings = dict.fromkeys(training_row(config, found, speed) for speed in speeds)
    yield from ("", *align_rows([TRAINING, *trainings]))


TRAINING = ("training", "with encoding", "from the cache", "speed-up", "build paid after", "saved in all")


def training_row(config: EstimateConfig, found: Measured, speed: float) -> tuple[str, ...]:
    """Format a training with encoding and from the cache, and what the cache saves in all epochs."""
    live_s, cached_s = seconds_of_training(config, found, speed)
    epoch_s, build_s, saved = (live_s - cached_s) * config.gpus, found.sample_s, "give --epochs"
    paid = f"{build_s / epoch_s:.1f} epochs" if epoch_s > 0 else "never"
    if config.epochs is not None:
        saved_s = (config.epochs * epoch_s - build_s) * found.spec.rows
        saved = f"{'lost: ' * (saved_s < 0)}{shown_time(abs(saved_s))} of GPUs"
        if (price := config.dollars_per_gpu_hour) is not None:
            saved += f", ${abs(saved_s) / HOUR_S * price:,.2f}"
    speeds = (per_s(seconds, "sample") for seconds in (1 / speed, live_s, cached_s))
    return *speeds, f"{live_s / cached_s:,.2f}x", paid, saved


def seconds_of_training(config: EstimateConfig, found: Measured, speed: float) -> tuple[float, float]:
    live_s = max(1 / speed + found.busy_s["encoding"] / config.gpus, found.read_s / config.gpus)
    return live_s, max(1 / speed, found.sample_bytes / (config.read_mb_per_s * 1e6))


def per_s(seconds: float, noun: str) -> str:
    return f"{1 / seconds:,.{1 if seconds > 0.01 else 0}f} {noun}s/s"


def shown_bytes(count: float) -> str:
    unit, size = next(((unit, size) for unit, size in UNITS.items() if count >= size), ("bytes", 1.0))
    return f"{count / size:,.{1 if size > 1 else 0}f} {unit}"
