"""`precompute audit`: encode a random sample of images again and compare with the cached latents.

Verification shows that a cache holds the bytes as written; an audit, that they were right. A latent depends on its
planned batch, so the whole batch of a drawn sample is encoded again and compared. Only the drawn samples enter the
last line's share, because errors within one batch are not independent.
"""

import secrets
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, tee
from math import inf
from threading import Event

import msgspec
import numpy as np
import pyarrow as pa
import torch

from cache_store.cache.metadata import read_commit
from cache_store.cache.reader import Cache, open_cache
from cache_store.errors import CacheError
from cache_store.format.layout import commit_file, samples_file
from cache_store.format.schema import CommitRun
from cache_store.format.tables import CACHED
from cache_store.messages import counted, differences_between, refuse
from cache_store.program.progress_bar import ProgressBar
from cache_store.program.running import stop_on_signals
from cache_store.storage.store import Address
from precompute.audit_report import AuditReport, ComparedSample, differences, source_problem
from precompute.config import AuditConfig, BuildConfig, advising_on_moved_paths
from precompute.encode.batches import Batch, Decoders, decoded_batches
from precompute.encode.pipeline import library_versions
from precompute.encode.tolerance import LIMITS, Limits, device_class, root_mean_square, sample_units
from precompute.encode.worker import ENCODER_THREADS
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.inputs import make_reader
from precompute.rerun.facts import recipe_of
from precompute.sources.images import Source
from precompute.sources.opening import open_source

SHARDS_HELD = 16
"""Samples tables kept in memory."""

SEEDS = 2**32


def audit(address: Address, config: AuditConfig) -> AuditReport:
    """Compare a random draw of samples; after a signal, or when time is up, report the comparisons made so far.

    Raises StaleError if the encoder is not the one that made the cache, CacheError if the cache is damaged or not
    sealed.
    """
    silence_decoders()
    cache = open_cache(address)
    if not len(cache):
        raise CacheError(f"{cache.store} holds no cached sample; there is nothing to audit")
    built = BuildConfig.of_cache(cache.store)
    with advising_on_moved_paths(cache.store):
        source = open_source(built.source, built.media)
        wanted = replace(built.encoder, device=config.device or built.encoder.device)
        encoder = load_encoder(wanted, built.image_recipe)
    refuse_changed_encoder(cache, built, encoder)
    torch.set_num_threads(ENCODER_THREADS)
    with Decoders(built.run.threads(1)) as pool, stop_on_signals() as stop:
        return Auditor(cache, source, encoder, pool).run(config, stop)


def refuse_changed_encoder(cache: Cache, built: BuildConfig, encoder: Encoder) -> None:
    """Raise StaleError with a table of what changed in the recorded encoder and recipe since the build."""
    before, now = cache.spec.array, recipe_of(built, encoder).array
    if differences := differences_between(msgspec.to_builtins(before), msgspec.to_builtins(now)):
        refuse(
            f"{cache.store}: {built.encoder.model} is no longer the encoder that made this cache; nothing was compared",
            differences,
            ["restore the encoder as it was and run the same command again"],
        )


def random_order(total: int, seed: int) -> Iterator[int]:
    """Yield each number in [0, total) once, in random order.

    This is a Fisher-Yates shuffle that stores only the moved places, because the cache may be far larger than the draw.
    """
    generator, moved = np.random.default_rng(seed), dict[int, int]()
    for place in range(total):
        taken = int(generator.integers(place, total))
        yield moved.get(taken, taken)
        moved[taken] = moved.pop(place, place)


class Auditor:
    """Encodes planned batches of a sealed cache again and compares them with what it holds."""

    def __init__(self, cache: Cache, source: Source, encoder: Encoder, pool: Decoders) -> None:
        self._cache, self._encoder, self._pool = cache, encoder, pool
        self._array, self._reader = cache.spec.array, make_reader(source, cache.spec.array, encoder.texts)
        self._units = sample_units(self._array, cache.seal.array)
        self._planned = lru_cache(maxsize=SHARDS_HELD)(self._read_planned)
        self._runs: dict[int, CommitRun] = {}
        """Device and library versions of each shard's build, for the shards read so far."""

    def run(self, config: AuditConfig, stop: Event) -> AuditReport:
        started, total = time.monotonic(), len(self._cache)
        seed = secrets.randbelow(SEEDS) if config.seed is None else config.seed
        to_draw = min(config.num_samples or total, total)
        order, ahead = tee(islice(random_order(total, seed), to_draw))
        drawn, compared, upcoming = list[ComparedSample](), dict[int, ComparedSample](), next(order, None)
        limit_s = config.seconds if config.num_samples is None else None
        with ProgressBar("audit", limit_s or to_draw, "s" if limit_s else "sample") as bar:
            for batch in decoded_batches(self._batches(ahead), self._pool):
                compared.update({each.number: each for each in self._compare(batch)})
                while upcoming in compared:  # in draw order: the other samples of a batch do not count as drawn
                    drawn.append(compared[upcoming])
                    upcoming = next(order, None)
                seconds = time.monotonic() - started
                if limit_s:
                    bar.reach(min(round(seconds, 1), limit_s), counted(len(drawn), "sample"))
                else:
                    bar.reach(len(drawn))
                if stop.is_set() or seconds > (config.seconds or inf):
                    self._pool.shutdown(cancel_futures=True)
                    break
        return self._report(seed, time.monotonic() - started, to_draw, drawn, compared.values())

    def _batches(self, drawn: Iterable[int]) -> Iterator[Batch]:
        """Yield the planned batches of the drawn samples, each once, in the order of the draw."""
        size = self._array.encoder.batch_size
        batched = set[int]()
        for number in (number for number in drawn if number not in batched):
            shard = int(self._cache.shards.shards_of(number))
            planned, numbers = self._planned(shard)
            start = int(np.flatnonzero(numbers == number)[0]) // size * size
            batch = Batch(self._reader, self._cache.spec, planned, shard, start)
            batched.update(numbers[batch.start : batch.stop].tolist())
            yield batch

    def _read_planned(self, shard: int) -> tuple[pa.Table, np.ndarray]:
        """Read a shard's planned samples, and their sample numbers, -1 for rejected ones."""
        shards, file, count = self._cache.shards, samples_file(shard), self._cache.seal.cached_per_shard[shard]
        names = ["row", "id", "conversations", "content_sha256", "status", *self._reader.columns]
        table = shards.table(shard, [*dict.fromkeys(names)])
        cached = np.array(table["status"].to_pylist()) == CACHED
        if table["row"].to_pylist() != list(self._cache.spec.shard_rows(shard)) or cached.sum() != count:
            raise CacheError(f"{file} is damaged; run `cache-store verify {shlex.quote(str(self._cache.store))}`")
        numbers = np.full(table.num_rows, -1, np.int64)
        numbers[cached] = np.arange(shards.starts[shard], shards.ends[shard])
        return table, numbers

    def _compare(self, batch: Batch) -> Iterator[ComparedSample]:
        """Encode the batch again and compare every cached sample of it."""
        outcomes = batch.wait()
        encoded = self._encoder.encode(torch.from_numpy(batch.inputs)).cpu().numpy()
        samples = batch.samples.to_pylist()
        numbers = self._planned(batch.shard)[1][batch.start : batch.stop]
        places = np.flatnonzero(numbers >= 0)
        found = differences(self._cache.read(numbers[places]), encoded[places], self._array.dtype, self._units)
        for place, difference in zip(places.tolist(), found, strict=True):
            problem = source_problem(samples[place]["content_sha256"], outcomes[place])
            yield ComparedSample(
                number=int(numbers[place]),
                shard=batch.shard,
                row=samples[place]["row"],
                id=samples[place]["id"],
                limits=self._limits(batch.shard),
                difference=None if problem else difference,
                source_problem=problem,
            )

    def _limits(self, shard: int) -> Limits:
        """Look up the limits for the shard's device and this one."""
        if shard not in self._runs:
            record = read_commit(self._cache.store, shard)
            if record is None:
                command = f"cache-store verify {shlex.quote(str(self._cache.store))}"
                raise CacheError(f"{commit_file(shard)} is missing; run `{command}`")
            self._runs[shard] = record.run
        devices = device_class(self._runs[shard].device, str(self._encoder.device))
        return LIMITS[self._array.encoder.compute_dtype, devices]

    def _report(
        self,
        seed: int,
        seconds: float,
        to_draw: int,
        drawn: Iterable[ComparedSample],
        compared: Iterable[ComparedSample],
    ) -> AuditReport:
        runs, device = list(self._runs.values()), str(self._encoder.device)
        devices = device_class(*(run.device for run in runs), device)
        return AuditReport(
            cache=str(self._cache.store),
            identity=self._cache.seal.identity,
            seed=seed,
            seconds=round(seconds, 3),
            device=device,
            versions=library_versions(),
            built_on=tuple(sorted({run.device for run in runs})),
            built_with=tuple({tuple(run.versions.items()): run.versions for run in runs}.values()),
            made_by=tuple(sorted({run.made_by for run in runs})),
            device_class=devices,
            compute_dtype=self._array.encoder.compute_dtype,
            store_dtype=self._array.dtype,
            limits=LIMITS[self._array.encoder.compute_dtype, devices],
            root_mean_square=root_mean_square(self._cache.seal.array),
            samples=len(self._cache),
            asked=to_draw,
            drawn=tuple(drawn),
            compared=tuple(compared),
        )
