"""Describe a cache in a few lines; of an unfinished one, how its build goes on, from its commit records alone."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec
import numpy as np

from cache_store.cache.metadata import read_commit, read_seal, read_spec
from cache_store.errors import CacheError
from cache_store.format.array import ArrayRecipe
from cache_store.format.schema import CommitContent, CommitRecord, Seal, Spec
from cache_store.messages import counted, shown_time
from cache_store.storage.store import Address, map_calls, open_store
from cache_store.version import __version__

LEAST_WINDOW_S = 600.0
"""The rate is that of the last ten minutes, or longer if shards take longer."""

SHARDS_IN_WINDOW = 3
"""Least time of the window, in times of the slowest shard."""

SHOWN_MAKERS = 8
"""Most lines of hardware and libraries; those that made most shards are shown."""

SHOWN_FEATURES = 64
"""Most features whose means and deviations are listed; if there are more, only minimum and maximum are shown."""


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A device that has built shards."""

    host: str
    device: str
    shards: int
    last_commit: str
    silent_s: float
    """Seconds since its last commit."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The state of an unfinished build."""

    rows_left: int
    images_per_s: float
    """Rows of the shards committed within the window, over its length; 0 if there are none."""
    seconds_left: float | None
    """Time left; None if no shard was committed within the window."""
    builders: tuple[Builder, ...]


@dataclass(frozen=True, kw_only=True)
class Described:
    """The spec, the records and the seal of a cache; an unfinished one has fewer."""

    cache: str
    spec: Spec
    records: list[CommitRecord]
    pace: Pace | None
    """How the build goes on, if it has not committed every shard."""
    seal: Seal | None
    problem: str | None
    """Why there is no seal."""

    def as_lines(self) -> list[tuple[str, str]]:
        lines = [("cache", self.cache), *spec_lines(self.spec), *array_lines(self.spec.array)]
        lines += [*progress_lines(self.spec, self.records), *pace_lines(self.pace, self.spec.array.made_of)]
        return [*lines, *seal_lines(self.seal, self.problem)]

    def as_dict(self) -> dict[str, object]:
        """Return spec and statistics as the cache records them, and sums over the commit records, for programs."""
        contents, runs = [record.content for record in self.records], [record.run for record in self.records]
        return {
            "cache": self.cache,
            "version": __version__,
            "spec_digest": self.spec.digest,
            "spec": msgspec.to_builtins(self.spec),
            "shards": self.spec.num_shards,
            "committed": len(self.records),
            "bytes": sum(content.files[0].bytes for content in contents),
            "cached": sum(content.cached for content in contents),
            "rejected": sum(content.rejected for content in contents),
            "reasons": all_counts(contents, "reasons"),
            "remarks": all_counts(contents, "remarks"),
            "cut_texts": sum(content.cut_texts for content in contents),
            "images_per_s": statistics.median(run.images_per_s for run in runs) if runs else None,
            "devices": sorted({run.device for run in runs}),
            "hosts": sorted({run.host for run in runs}),
            "made_by": dict(Counter(run.made_by for run in runs)),
            "pace": asdict(self.pace) if self.pace else None,
            "identity": self.seal.identity if self.seal else None,
            "statistics": msgspec.to_builtins(self.seal.array) if self.seal else None,
            "not_sealed_because": self.problem,
        }


def describe(cache: Address) -> Described:
    """Read a cache's spec, records and seal; CacheError if its spec cannot be read."""
    spec = read_spec(store := open_store(cache))
    found = map_calls(store, partial(read_commit, store), range(spec.num_shards))
    by_shard = {shard: record for shard, record in enumerate(found) if record}
    seal, problem = None, None
    try:
        seal = read_seal(store)
    except CacheError as error:
        problem = str(error)
    pace = pace_of(spec, by_shard)
    return Described(cache=str(store), spec=spec, records=[*by_shard.values()], pace=pace, seal=seal, problem=problem)


def spec_lines(spec: Spec) -> Iterator[tuple[str, str]]:
    yield "format", f"{spec.store_format}, version {spec.format_version}"
    yield "spec digest", spec.digest
    yield "rows", f"{spec.rows:,} in {counted(spec.num_shards, 'shard')} of {spec.samples_per_shard:,}"
    for index, array in enumerate(spec.sized_arrays):
        shards = np.flatnonzero(spec.array_indices == index)
        rows, size = int(np.diff(spec.bounds)[shards].sum()), f"{list(array.shape)}, {array.sample_bytes:,} bytes"
        yield f"size {array.size.name}", f"{counted(rows, 'row')} in {counted(len(shards), 'shard')}, {size} a sample"


def array_lines(array: ArrayRecipe) -> Iterator[tuple[str, str]]:
    yield "array", f"{array.dtype} [{array.named_axes}], codec {array.codec}"
    yield array.made_of, array.recipe_summary
    yield "encoder", array.encoder.summary
    yield "weights sha256", array.encoder.weights_sha256


def progress_lines(spec: Spec, records: list[CommitRecord]) -> Iterator[tuple[str, str]]:
    contents = [record.content for record in records]
    cached, rejected = sum(each.cached for each in contents), sum(each.rejected for each in contents)
    why = ", ".join(f"{count} {reason}" for reason, count in all_counts(contents, "reasons").most_common())
    stored = sum(content.files[0].bytes for content in contents)
    cut = sum(each.cut_texts for each in contents)
    yield "committed", f"{len(records):,} of {counted(spec.num_shards, 'shard')}, {stored:,} bytes"
    yield "samples", f"{cached:,} cached, {rejected:,} rejected" + (f" ({why})" if why else "")
    for remark, number in sorted(all_counts(contents, "remarks").items()):
        what, _, effect = remark.partition(", ")
        yield what, f"{counted(number, f'cached {spec.array.made_of}')}, {effect}"
    if cut:
        yield "longer texts", f"{counted(cut, 'cached text')}, cut"
    if records:
        rates = [record.run.images_per_s for record in records]
        devices = ", ".join(sorted({record.run.device for record in records}))
        hosts = ", ".join(sorted({record.run.host for record in records}))
        yield (
            "built",
            f"{statistics.median(rates):.1f} {spec.array.made_of}s/s a worker (median shard) on {devices} at {hosts}",
        )
        made_by = Counter(record.run.made_by for record in records)
        for maker, shards in made_by.most_common(SHOWN_MAKERS):
            yield "made by", f"{counted(shards, 'shard')}: {maker}" if len(made_by) > 1 else maker


def pace_lines(pace: Pace | None, made_of: str) -> Iterator[tuple[str, str]]:
    if pace is None:
        return
    left = f"{pace.rows_left:,} rows left"
    if pace.seconds_left is not None:
        left = f"{pace.images_per_s:,.1f} {made_of}s/s now, {left}: {shown_time(pace.seconds_left)}"
    yield "pace", left
    for each in pace.builders[:SHOWN_MAKERS]:
        last = f"{counted(each.shards, 'shard')}, the last {shown_time(each.silent_s)} ago"
        yield "builder", f"{each.device} at {each.host}: {last}"


def all_counts(contents: list[CommitContent], field: str) -> "Counter[str]":
    """Add up the shards' counts of rejected samples by reason, or of cached ones by remark."""
    return sum((Counter(getattr(content, field)) for content in contents), Counter[str]())


def seal_lines(seal: Seal | None, problem: str | None) -> Iterator[tuple[str, str]]:
    if seal is None:
        yield "seal", problem or ""
        return
    yield "cache identity", seal.identity
    summary = seal.array
    yield "mean", format_values(summary.mean)
    yield "std", format_values(summary.std)
    yield "range", f"{min(summary.minimum):.4g} to {max(summary.maximum):.4g}"


def format_values(values: Sequence[float]) -> str:
    if len(values) > SHOWN_FEATURES:
        return f"{min(values):.3f} to {max(values):.3f} over {len(values):,} features"
    return ", ".join(f"{value:.3f}" for value in values)


def pace_of(spec: Spec, records: Mapping[int, CommitRecord], now: datetime | None = None) -> Pace | None:
    """Return the pace of a build; None if all shards are committed, or the records do not tell when they were."""
    ends = {shard: moment for shard, each in records.items() if (moment := committed_at(each)) is not None}
    missing = [shard for shard in range(spec.num_shards) if shard not in records]
    if not missing or not ends:
        return None
    now_s = (now or datetime.now(UTC)).timestamp()
    slowest = max(records[shard].run.seconds for shard in ends)
    since = now_s - max(LEAST_WINDOW_S, SHARDS_IN_WINDOW * slowest)
    recent = [shard for shard, end in ends.items() if end > since]
    begun = max(since, min((ends[shard] - records[shard].run.seconds for shard in recent), default=now_s))
    rate = sum(len(spec.shard_rows(shard)) for shard in recent) / max(now_s - begun, 1e-3)
    rows_left = sum(len(spec.shard_rows(shard)) for shard in missing)
    return Pace(
        rows_left=rows_left,
        images_per_s=rate,
        seconds_left=rows_left / rate if rate else None,
        builders=builders_of(records, ends, now_s),
    )


def committed_at(record: CommitRecord) -> float | None:
    try:
        return datetime.fromisoformat(record.run.committed_at).timestamp()
    except ValueError:
        return None


def builders_of(records: Mapping[int, CommitRecord], ends: Mapping[int, float], now_s: float) -> tuple[Builder, ...]:
    shards: dict[tuple[str, str], list[int]] = {}
    for shard in ends:
        shards.setdefault((records[shard].run.host, records[shard].run.device), []).append(shard)
    return tuple(
        Builder(
            host=host,
            device=device,
            shards=len(mine),
            last_commit=records[last := max(mine, key=lambda shard: ends[shard])].run.committed_at,
            silent_s=max(0.0, now_s - ends[last]),
        )
        for (host, device), mine in sorted(shards.items())
    )
