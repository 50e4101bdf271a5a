"""`precompute audit`: encode a random draw of samples again and compare them with the cached ones.

Verification shows that a cache holds the bytes as written; an audit shows that they were right. A sample depends on its
planned batch, so the whole batch of a drawn sample is encoded again and compared. Only the drawn samples enter the
last line's share, because errors within one batch are not independent.
"""

import secrets
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch

from cache_store.cache.metadata import read_commit
from cache_store.cache.reader import Cache, open_cache
from cache_store.cache.writer import Outcome
from cache_store.errors import CacheError
from cache_store.format.array import StoreDtype
from cache_store.format.layout import SEAL_FILE, commit_file, samples_file
from cache_store.format.quantized import as_read, steps
from cache_store.format.tables import CACHED
from cache_store.messages import align_rows, counted, differences_between, refuse
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import Address
from precompute.build.inputs import recipe_of
from precompute.config import AuditConfig, BuildConfig, advising_on_moved_paths
from precompute.encode.batches import Batch, Decoders, decoded_batches
from precompute.encode.tolerance import LIMITS, Difference, device_class, sample_units
from precompute.encode_images import encoder_threads
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.inputs import Reader, make_reader
from precompute.sources.opening import open_source

SEEDS = 2**32
CONFIDENCE = 0.95
SHOWN_FINDINGS = 50


@dataclass(frozen=True)
class Finding:
    """A cached sample that is not the one of its image (`latent`), or whose image is not the encoded one (`image`)."""

    shard: int
    row: int
    id: str
    kind: str
    problem: str


@dataclass(kw_only=True)
class AuditReport:
    """The counts and findings of an audit so far."""

    cache: str
    identity: str
    seed: int
    device: str
    samples: int
    """Cached samples in the whole cache."""
    drawn: int
    limits: str = ""
    """The differences allowed beyond rounding, for the devices of the last batch."""
    compared: int = 0
    """Samples compared: the whole batches of the drawn samples."""
    equal_bits: int = 0
    worst: float = 0.0
    """Largest absolute difference of a value; infinite if a new latent is not finite."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def statement(self) -> str:
        """Say which samples are wrong, or how many may be."""
        wrong = "differ by more than the limits and rounding, or their image is not the encoded one"
        if self.compared == self.samples:
            return f"all {self.samples:,} cached samples were compared: {len(self.findings):,} {wrong}"
        if self.findings:
            return f"{len(self.findings):,} of the {self.compared:,} samples compared {wrong}"
        # if a share of 1 - 0.05 ** (1 / n) were wrong, a draw of n samples would have one in 95 of 100 draws
        bound = 1 - (1 - CONFIDENCE) ** (1 / self.drawn)
        return f"with {CONFIDENCE:.0%} confidence at most {bound:.2%} of the {self.samples:,} cached samples {wrong}"

    @property
    def next_steps(self) -> list[str]:
        """Return the steps to take after findings."""
        found, shards = list[str](), {each.shard for each in self.findings if each.kind == "latent"}
        if shards:
            names = [f"{self.cache}/{name}" for name in (SEAL_FILE, *map(commit_file, sorted(shards)))]
            found += [
                f"if the encoder and the sources are right, run: rm {shlex.join(names)}",
                "rerun the `precompute build` that made the cache: it encodes these shards again. The cache gets a new "
                "identity, so restart training. If the seal stays, the build accepts only the sealed bytes",
            ]
        if any(each.kind == "image" for each in self.findings):
            found.append("restore the original images, or build a new cache; changed images cannot go into this one")
        return found

    def as_dict(self) -> dict[str, object]:
        fields = {**asdict(self), "statement": self.statement, "next": self.next_steps}
        return {"sound": not self.findings, "error": None, **fields}

    def lines(self) -> list[str]:
        """Format the conditions, the findings, the statement, the next steps."""
        fields = [
            ("seed", str(self.seed)),
            ("drawn", f"{self.drawn:,} of {self.samples:,} cached samples"),
            ("compared", f"{counted(self.compared, 'sample')}, the planned batches of those drawn, on {self.device}"),
            ("equal bits", f"{self.equal_bits:,} of {self.compared:,}"),
            ("worst", f"{self.worst:.3g}"),
            ("limits", f"{self.limits}, of the root mean square"),
        ]
        found = [f"row {each.row}, {each.id} (shard {each.shard}): {each.problem}" for each in self.findings]
        if more := found[SHOWN_FINDINGS:]:
            found[SHOWN_FINDINGS:] = [f"and {len(more):,} more; --report FILE writes them all"]
        return [*align_rows(fields), *found, self.statement, *(f"next: {step}" for step in self.next_steps)]


def audit(address: Address, config: AuditConfig) -> AuditReport:
    """Compare a random draw of samples; StaleError for another encoder, CacheError for a damaged or unsealed cache."""
    silence_decoders()
    cache = open_cache(address)
    if not len(cache):
        raise CacheError(f"{cache.store} holds no cached sample; there is nothing to audit")
    built = BuildConfig.of_cache(cache.store)
    with advising_on_moved_paths(cache.store):
        source = open_source(built.source, built.media)
        wanted = replace(built.encoder, device=config.device or built.encoder.device)
        encoder = load_encoder(wanted, built.image_recipe)
    before, now = (msgspec.to_builtins(each) for each in (cache.spec.array, recipe_of(built, encoder).array))
    if differences := differences_between(before, now):
        changed = f"{built.encoder.model} is no longer the encoder that made this cache; nothing was compared"
        refuse(
            f"{cache.store}: {changed}", differences, ["restore the encoder as it was and run the same command again"]
        )
    seed = secrets.randbelow(SEEDS) if config.seed is None else config.seed
    drawn = draw(len(cache), config.samples, seed)
    report = AuditReport(
        cache=str(cache.store),
        identity=cache.seal.identity,
        seed=seed,
        device=str(encoder.device),
        samples=len(cache),
        drawn=len(drawn),
    )
    reader = make_reader(source, cache.spec.array, encoder.texts)
    with Decoders(built.run.threads(1)) as pool, encoder_threads(), ProgressBar("audit", None, "sample") as bar:
        for batch in decoded_batches(planned_batches(cache, reader, drawn), pool):
            batch.wait()
            compare(cache, batch, encoder.encode(torch.from_numpy(batch.inputs)).cpu().numpy(), report)
            bar.reach(report.compared)
    return report


def draw(total: int, samples: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(total, min(total, samples), replace=False))


def planned_batches(cache: Cache, reader: Reader, drawn: np.ndarray) -> Iterator[Batch]:
    """Yield the planned batches of the drawn samples, each once."""
    size, shards = cache.spec.array.encoder.batch_size, cache.shards.shards_of(drawn)
    columns = dict.fromkeys(["row", "id", "state", "conversations", "content_sha256", "status", *reader.columns])
    for shard in np.unique(shards).tolist():
        table = cache.shards.table(shard, [*columns])
        numbers = numbers_of(cache, shard, table)
        for start in np.unique(np.flatnonzero(np.isin(numbers, drawn)) // size * size).tolist():
            yield Batch(reader, cache.spec, table, shard, start)


def numbers_of(cache: Cache, shard: int, table: pa.Table) -> np.ndarray:
    """Return the sample number of each planned row of a shard, -1 for rejected ones; CacheError for a damaged table."""
    cached = np.array(table["status"].to_pylist()) == CACHED
    is_whole = table["row"].to_pylist() == list(cache.spec.shard_rows(shard))
    if not is_whole or cached.sum() != cache.shards.roll.cached[shard]:
        raise CacheError(f"{samples_file(shard)} is damaged; run `cache-store verify {shlex.quote(str(cache.store))}`")
    return np.where(cached, cache.shards.starts[shard] + np.cumsum(cached) - 1, -1)


def compare(cache: Cache, batch: Batch, encoded: np.ndarray, report: AuditReport) -> None:
    """Compare every cached sample of the batch with its new latent, float32."""
    numbers = numbers_of(cache, batch.shard, batch.planned)[batch.start : batch.stop]
    if (record := read_commit(cache.store, batch.shard)) is None:
        missing = f"{commit_file(batch.shard)} is missing"
        raise CacheError(f"{missing}; run `cache-store verify {shlex.quote(str(cache.store))}`")
    kind = cache.spec.array.encoder.compute_dtype, device_class(record.run.device, report.device)
    limits, units = LIMITS[kind], sample_units(cache.spec.array, cache.seal.array)
    samples, outcomes, places = batch.samples.to_pylist(), batch.wait(), np.flatnonzero(numbers >= 0)
    pairs = zip(cache.read(numbers[places]), as_read(encoded[places], batch.array.dtype), strict=True)
    for place, (stored, rounded) in zip(places.tolist(), pairs, strict=True):
        sample, kind_of, problem = samples[place], "image", source_problem(samples[place], outcomes[place])
        if problem is None:
            largest, beyond = difference_of(stored, rounded, batch.array.dtype, units)
            report.worst = max(report.worst, largest)
            report.equal_bits += stored.tobytes() == rounded.tobytes()
            if not limits.admit(beyond):
                kind_of, problem = "latent", f"its latent differs by {beyond}; the limit is {limits}"
        if problem is not None:
            report.findings.append(Finding(batch.shard, sample["row"], sample["id"], kind_of, problem))
    report.compared, report.limits = report.compared + len(places), str(limits)


def source_problem(sample: dict[str, Any], outcome: Outcome) -> str | None:
    before, now = sample["content_sha256"], outcome.content_sha256
    if now is None:
        return f"its image is gone: {outcome.reason}"
    if now != before:
        return f"its image changed: sha256 is {now[:12]}…, was {before[:12]}…"
    return outcome.reason  # same bytes, but this version of a library cannot decode them


def difference_of(
    stored: np.ndarray, rounded: np.ndarray, dtype: StoreDtype, units: np.ndarray
) -> tuple[float, Difference]:
    """Return the largest difference of two samples as read, and the differences beyond rounding, in `units`.

    Rounding moves a value by at most half a step of `dtype`, so it adds at most one step to a difference. A value that
    is not finite differs by infinity.
    """
    known = np.where(np.isfinite(rounded), rounded, stored)
    step = np.maximum(*(steps(each[None], dtype)[0] for each in (stored, known))).astype(np.float64)
    distance = np.abs(stored.astype(np.float64) - known.astype(np.float64))
    distance[~np.isfinite(rounded)] = np.inf
    return float(distance.max()), Difference.of(np.maximum(distance - step, 0.0) / units)
