"""Measure the pace of a build's worker: encode real batches of a random draw of the source, and write into memory.

Each size of a cache is measured for its share of the time. The clock starts after its first batch, which warms up and
fills the queues. The memory of the draw does not grow with the source's list.
"""

import hashlib
import io
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, cycle, islice
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import refuse_foreign_place
from cache_store.cache.writer import encoded_rows, scaled
from cache_store.errors import SourceError
from cache_store.format.array import CodecName, Size
from cache_store.format.formats import FORMATS, shard_format
from cache_store.format.schema import Part, Recipe, SizedArray, Spec, even_shards
from cache_store.format.sums import RunningSums
from cache_store.format.tables import reason_kind
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.prefetch import begun_ahead
from cache_store.storage.store import open_store
from precompute.build.decide import refuse_impossible
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.request import BuildRequest
from precompute.config import EstimateConfig
from precompute.encode.batches import Batch, Decoders, decoded_batches
from precompute.encode.crew import crew_of
from precompute.encode.device_feed import Encoding, feed_of
from precompute.encode.pipeline import WRITES_BEHIND, encode_batch
from precompute.encode_images import encoder_threads
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.estimate import Measured
from precompute.images.decode import silence_decoders
from precompute.inputs import make_reader
from precompute.inputs.busy import BusyTimes
from precompute.sources.images import Source
from precompute.sources.opening import open_source
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


def measure(config: EstimateConfig) -> Measured:
    """Measure one worker of a build here.

    Raises SourceError if every drawn sample is rejected, ConfigError if no such cache is possible. As in `build`, a
    place where no cache can be is refused before anything is loaded.
    """
    silence_decoders()
    config = config.prepared()
    refuse_foreign_place(store := open_store(config.cache), "cache")
    source = open_source(config.source, config.media)
    encoder = load_encoder(config.encoder, config.image_recipe)
    inputs = BuildInputs(config=config, request=BuildRequest(), store=store, source=source, encoder=encoder)
    recipe, reader = inputs.recipe, inputs.reader
    listed = reader.samples(source.samples())
    count, drawn = draw(listed, config.encoder.batch_size)
    if not drawn:
        raise SourceError("; ".join(filter(None, [f"source.path: {config.source.path} holds no samples", listed.note])))
    by_size = defaultdict[Size, list[pa.Table]](list)
    for shard, size in make_arranger(inputs)(make_table(drawn, listed.extra, config.source.path)):
        by_size[size].append(shard)
    arrays, tables = [*map(inputs.array_of, by_size)], [*map(pa.concat_tables, by_size.values())]
    spec = spec_of(recipe, arrays, [max(1, each.num_rows * count // len(drawn)) for each in tables])
    refuse_impossible(spec)
    threads = config.run.threads(crew_of(config, spec.num_shards)[1])
    one_shard = msgspec.structs.replace(recipe, samples_per_shard=len(drawn))  # holds all drawn rows of a size
    probe = Probe(spec_of(one_shard, arrays, [each.num_rows for each in tables]), tables, source, encoder, threads)
    with encoder_threads():
        times = probe.run(config.seconds)
    reasons = [*chain(*probe.reasons.values())]
    if len(rejected := [reason for reason in reasons if reason is not None]) == len(reasons):
        raise SourceError(f"all {len(rejected):,} samples drawn would be rejected, such as: {rejected[0]}")
    return Measured(
        spec=spec,
        encoded=len(reasons),
        rejected=Counter(map(reason_kind, rejected)),
        device=str(encoder.device),
        threads=threads,
        sample_s=max(times.pop("worker"), *times.values()),  # over few batches, a part may seem slower than the whole
        busy_s=times,
        stored_bytes=probe.stored_bytes(),
        free=store.free_bytes(),
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
    shards = [*chain(*runs)]
    part = Part(rows=sum(counts), shards=sum(run.shards for run in shards), digest=NO_PLAN)
    return recipe.spec([part], shards, arrays)


class Probe:
    """A worker that encodes drawn samples as a build does, and writes them into memory."""

    def __init__(self, spec: Spec, tables: Sequence[pa.Table], source: Source, encoder: Encoder, threads: int) -> None:
        """Take the planned rows of each array; in `spec`, each array has one shard."""
        self._spec, self._tables, self._feed = spec, tables, feed_of(encoder)
        self._busy, self._decoders = BusyTimes(threads), Decoders(threads)
        self._reader = make_reader(source, spec.array, encoder.texts, busy=self._busy)
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
        for number, written in enumerate(begun_ahead(self._encoded(shard), WRITES_BEHIND)):
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
