"""`precompute estimate`: measure real batches of a random draw to estimate a build's time, size and saving.

It writes nothing. The memory of the draw does not grow with the source's list.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import pyarrow as pa

from cache_store.cache.metadata import refuse_foreign_place
from cache_store.errors import SourceError
from cache_store.format.array import CodecName
from cache_store.format.schema import Recipe, ShardRun, Spec, even_shards
from cache_store.format.tables import CLIP_START, PLAN_SCHEMA
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import open_store
from precompute.encode.crew import crew_of
from precompute.encode_images import encoder_threads
from precompute.encoders.registry import load_encoder
from precompute.estimate.costs import MeasuredStep, Prices, Training, read_step
from precompute.estimate.estimate_config import BATCH_SIZE, EstimateConfig
from precompute.estimate.probe import Probe, Prober
from precompute.estimate.sizes import CacheSize, sizes_by_codec
from precompute.images.decode import silence_decoders
from precompute.inputs import make_reader
from precompute.rerun.arrange import Arranger
from precompute.rerun.decide import checked_spec
from precompute.rerun.facts import make_arranger, recipe_of
from precompute.rerun.rows import UNSIZED, rows_in_scratch, slices_of
from precompute.sources.listing import Samples
from precompute.sources.opening import open_source

RUN_SAMPLES = 256
"""Samples drawn in one piece, because a build reads neighbours and some sources read them together."""
KEPT_RUNS = 64
"""Runs kept from a long list; only the fastest GPUs need more, and they probe some again."""


@dataclass(frozen=True)
class Drawn:
    """The number of samples in a list, and a random draw of them."""

    count: int
    runs: list[list[Mapping[str, Any]]]
    """Runs in random order; each holds neighbouring samples in the source's order."""


T = TypeVar("T", bound=Sized)


def full(batches: list[T], size: int) -> list[T]:
    """Return the full batches, or the first one if there is none."""
    return [batch for batch in batches if len(batch) == size] or batches[:1]


def draw(samples: Iterable[Mapping[str, Any]], batch_size: int, seed: int = 0) -> Drawn:
    """Read all samples once and keep a random choice of runs, each run with the same probability."""
    generator, runs, count = random.Random(seed), list[list[Mapping[str, Any]]](), 0
    for number, run in enumerate(runs_of(samples, -(-RUN_SAMPLES // batch_size) * batch_size)):
        count += len(run)
        place = generator.randint(0, number)  # Vitter's algorithm R, which also shuffles the first runs
        if number < KEPT_RUNS:
            runs.insert(place, run)
        elif place < KEPT_RUNS:
            runs[place] = run
    return Drawn(count, runs)


def runs_of(samples: Iterable[Mapping[str, Any]], length: int) -> Iterator[list[Mapping[str, Any]]]:
    each = iter(samples)
    while run := list(islice(each, length)):
        yield run


UNMEASURED_STEPS_S, UNMEASURED_CLIP_STEPS_S = (0.1, 0.3, 1.0), (1.0, 3.0, 10.0)
"""Step times shown if the config gives none."""

NO_PLAN = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The measurements, and the figures computed from them."""

    config: EstimateConfig
    spec: Spec
    """The cache's spec; its plan digest is a placeholder."""
    start_s: float
    """Seconds from the start of the program to the first batch: imports, weights, the source's list."""
    probe: Probe
    sizes: Mapping[CodecName, CacheSize]
    free: int | None
    """Free bytes at the cache's location; None if unknown."""
    trainings: Sequence[Training]
    """One training for each step time."""
    prices: Prices | None

    @property
    def size(self) -> CacheSize:
        return self.sizes[self.spec.array.codec]

    def at_most(self, per_s: float) -> float:
        """Return the samples per second of a worker that encodes so many, but writes no more than its writer can."""
        return min(per_s, self.size.write_per_s)

    @property
    def fits(self) -> bool:
        return self.free is None or self.size.total <= self.free


def estimate(config: EstimateConfig, started: float | None = None) -> Estimate:
    """Measure and estimate a build; the program was `started` at this time of `time.monotonic`, by default now.

    Raises SourceError if every drawn sample is rejected, ConfigError if no such cache is possible. As in `build`, a
    place where no cache can be is refused before anything is loaded.
    """
    started = time.monotonic() if started is None else started
    silence_decoders()
    config = config.prepared()
    refuse_foreign_place(store := open_store(config.cache), "cache")
    step = read_step(config.training_run) if config.training_run is not None else None
    source = open_source(config.source, config.media)
    encoder = load_encoder(config.encoder, config.image_recipe)
    recipe = recipe_of(config, encoder)
    reader = make_reader(source, recipe.array, encoder.texts, clips=config.clip, threads=config.run.threads(1))
    drawn = draw_samples(reader.samples(source.samples(), None), config)
    planned, probed, spec = batches_of_sizes(drawn, recipe, make_arranger(config, recipe, reader, encoder), config)
    checked_spec(spec)
    start_s = time.monotonic() - started
    with encoder_threads():
        threads = config.run.threads(crew_of(config, spec.num_shards).sharing)
        probe = Prober(probed, planned, source, encoder, threads).probe(config.seconds)
    table = pa.concat_tables(planned)
    sizes = sizes_by_codec(spec, probed.array_of(0), table, probe.samples[: table.num_rows])
    return Estimate(
        config=config,
        spec=spec,
        start_s=start_s,
        probe=probe,
        sizes=sizes,
        free=store.free_bytes(),
        trainings=trainings_of(config, step, probe, spec.rows, sizes[spec.array.codec]),
        prices=prices_of(config),
    )


def batches_of_sizes(
    drawn: Drawn, recipe: Recipe, arranger: Arranger, config: EstimateConfig
) -> tuple[list[pa.Table], Spec, Spec]:
    """Cut a draw into batches of one size each, as many as the draw has of it.

    Returns the batches in random order, the spec of a cache in which each is a shard, and that of the whole cache.
    """
    size, rows = config.encoder.batch_size, arranger.arrange_new(rows_in_scratch([plan_table([*chain(*drawn.runs)])]))
    shards = [*zip(rows.array_indices.tolist(), rows.shards(), strict=True)]
    batches, runs = list[tuple[str, pa.Table]](), list[ShardRun]()
    for index, array in enumerate(rows.arrays):
        table, name = pa.concat_tables(shard for each, shard in shards if each == index), array.size.name
        batches += [(name, batch) for batch in full([*slices_of(table, size)], size)]
        count = max(1, table.num_rows * drawn.count // len(rows))
        runs += even_shards(count, recipe.samples_per_shard, name)
    random.Random(0).shuffle(batches)
    probed = [ShardRun(shards=1, rows=batch.num_rows, array=name) for name, batch in batches]
    planned = [batch for _, batch in batches]
    return planned, recipe.spec(NO_PLAN, probed, rows.arrays), recipe.spec(NO_PLAN, runs, rows.arrays)


def draw_samples(samples: Samples, config: EstimateConfig) -> Drawn:
    with ProgressBar("list", None, "sample") as bar:

        def counted() -> Any:
            for sample in samples:
                bar.update()
                yield sample

        drawn = draw(counted(), config.encoder.batch_size)
    if not drawn.count:
        raise SourceError(
            "; ".join(filter(None, [f"source.path: {config.source.path} holds no samples", samples.note]))
        )
    return drawn


def plan_table(batch: Sequence[Mapping[str, Any]]) -> pa.Table:
    rows = [{"row": row, "size": UNSIZED, **sample, **(sample.get("extra") or {})} for row, sample in enumerate(batch)]
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA.append(pa.field(CLIP_START, pa.float64())))


def trainings_of(
    config: EstimateConfig, step: MeasuredStep | None, probe: Probe, images: int, size: CacheSize
) -> list[Training]:
    """Make one `Training` for each possible step time."""
    measured_s = config.step_seconds or (step and step.step_s)
    usual, steps_s = (1, UNMEASURED_CLIP_STEPS_S) if probe.made_of == "clip" else (BATCH_SIZE, UNMEASURED_STEPS_S)
    batch_size = config.batch_size or (step.batch_size if step else usual)
    return [
        Training(
            images=images,
            batch_size=batch_size,
            step_s=step_s,
            gpus=config.gpus,
            encode_per_s=probe.both_per_s if probe.shares_cores else probe.encode_per_s,
            decode_per_s=probe.decode_per_s,
            build_per_s=min(probe.both_per_s, size.write_per_s),
            sample_bytes=size.sample_bytes,
            read_bytes_per_s=config.read_mb_per_s * 1e6,
        )
        for step_s in ([measured_s] if measured_s else steps_s)
    ]


def prices_of(config: EstimateConfig) -> Prices | None:
    if config.dollars_per_gpu_hour is None:
        return None
    return Prices(gpu_hour=config.dollars_per_gpu_hour, gb_month=config.dollars_per_gb_month)
