"""What a person wants to know of a cache at a glance."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from cache_store.cache.metadata import read_commit, read_seal, read_spec
from cache_store.errors import CacheError
from cache_store.format.schema import ArraySpec, CommitRecord, Spec
from cache_store.refusal import counted
from cache_store.storage.store import Address, Store, open_store, wait_together

SHOWN_FEATURES = 64
"""Whose means and deviations are listed; of more, the least and the largest."""


def describe(cache: Address) -> list[tuple[str, str]]:
    """Field and value, in reading order; an unfinished cache is described as far as it goes."""
    spec = read_spec(store := open_store(cache))
    lines = [("cache", str(store)), *spec_lines(spec)]
    found = wait_together(store, partial(read_commit, store), range(spec.num_shards))
    records = [record for record in found if record]
    return [*lines, *array_lines(spec.array), *progress_lines(spec, records), *seal_lines(store)]


def spec_lines(spec: Spec) -> Iterator[tuple[str, str]]:
    yield "format", f"{spec.store_format}, version {spec.format_version}"
    yield "spec digest", spec.digest
    yield "rows", f"{spec.rows:,} in {counted(spec.num_shards, 'shard')} of {spec.samples_per_shard:,}"


def array_lines(array: ArraySpec) -> Iterator[tuple[str, str]]:
    yield "array", f"{array.dtype} [{array.named_shape}], codec {array.codec}, {array.sample_bytes:,} bytes a sample"
    yield "image", array.image.summary
    yield "encoder", array.encoder.summary
    yield "weights sha256", array.encoder.weights_sha256


def progress_lines(spec: Spec, records: list[CommitRecord]) -> Iterator[tuple[str, str]]:
    contents = [record.content for record in records]
    cached, rejected = sum(each.cached for each in contents), sum(each.rejected for each in contents)
    reasons: Counter[str] = Counter()
    for content in contents:
        reasons.update(content.reasons)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    stored = sum(content.files[0].bytes for content in contents)
    yield "committed", f"{len(records):,} of {counted(spec.num_shards, 'shard')}, {stored:,} bytes"
    yield "samples", f"{cached:,} cached, {rejected:,} rejected" + (f" ({why})" if why else "")
    if records:
        rates = [record.run.images_per_s for record in records]
        devices = ", ".join(sorted({record.run.device for record in records}))
        hosts = ", ".join(sorted({record.run.host for record in records}))
        yield "built", f"{statistics.median(rates):.1f} images/s a worker (median shard) on {devices} at {hosts}"


def seal_lines(store: Store) -> Iterator[tuple[str, str]]:
    try:
        seal = read_seal(store)
    except CacheError as error:
        yield "seal", str(error)
        return
    yield "cache identity", seal.identity
    summary = seal.array
    yield "mean", listed(summary.mean)
    yield "std", listed(summary.std)
    yield "range", f"{min(summary.minimum):.4g} to {max(summary.maximum):.4g}"


def listed(values: Sequence[float]) -> str:
    if len(values) > SHOWN_FEATURES:
        return f"{min(values):.3f} to {max(values):.3f} over {len(values):,} features"
    return ", ".join(f"{value:.3f}" for value in values)
