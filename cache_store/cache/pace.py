"""A build's progress, from the cache's commit records alone: rate, time left, silent builders, overdue shards.

Builds begin shards in ascending order, ranks too. So a shard is overdue if a later one was committed long ago.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cache_store.format.schema import CommitRecord, Spec

LEAST_WINDOW_S = 600.0
"""The rate is that of the last ten minutes, or longer if shards take longer."""

PATIENCE = 3.0
"""A shard is overdue after so many times the seconds that the slowest shard took."""

LEAST_PATIENCE_S = 60.0


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
    patience_s: float
    builders: tuple[Builder, ...]
    overdue: tuple[int, ...]
    """Shards that later ones overtook more than `patience_s` ago; every missing one if all builders are silent."""


def pace_of(spec: Spec, records: Mapping[int, CommitRecord], now: datetime | None = None) -> Pace | None:
    """Return the pace of a build; None if all shards are committed, or the records do not tell when they were."""
    ends = {shard: moment for shard, each in records.items() if (moment := committed_at(each)) is not None}
    missing = [shard for shard in range(spec.num_shards) if shard not in records]
    if not missing or not ends:
        return None
    now_s = (now or datetime.now(UTC)).timestamp()
    slowest = max(records[shard].run.seconds for shard in ends)
    patience_s = max(LEAST_PATIENCE_S, PATIENCE * slowest)
    since = now_s - max(LEAST_WINDOW_S, PATIENCE * slowest)
    recent = [shard for shard, end in ends.items() if end > since]
    begun = max(since, min((ends[shard] - records[shard].run.seconds for shard in recent), default=now_s))
    rate = sum(len(spec.shard_rows(shard)) for shard in recent) / max(now_s - begun, 1e-3)
    rows_left = sum(len(spec.shard_rows(shard)) for shard in missing)
    return Pace(
        rows_left=rows_left,
        images_per_s=rate,
        seconds_left=rows_left / rate if rate else None,
        patience_s=patience_s,
        builders=builders_of(records, ends, now_s),
        overdue=overdue(missing, ends, now_s - patience_s),
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


def overdue(missing: list[int], ends: Mapping[int, float], before_s: float) -> tuple[int, ...]:
    """Return the missing shards with a later shard that ended before this moment; all, if every shard did."""
    if max(ends.values()) < before_s:
        return tuple(missing)
    last_in_time = max((shard for shard, end in ends.items() if end < before_s), default=-1)
    return tuple(shard for shard in missing if shard < last_in_time)
