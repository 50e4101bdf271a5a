"""A build's progress, from the cache's commit records alone: rate, time left, and each builder's last commit."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cache_store.format.schema import CommitRecord, Spec

LEAST_WINDOW_S = 600.0
"""The rate is that of the last ten minutes, or longer if shards take longer."""

SHARDS_IN_WINDOW = 3
"""Least time of the window, in times of the slowest shard."""


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
    """Return when a shard was committed, in seconds since 1970; None if its record does not tell."""
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
