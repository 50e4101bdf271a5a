"""The options of `verify`: which shards it reads, and how closely. Imports little: a help shows them."""

import re
from dataclasses import dataclass, field
from typing import Literal

from cache_store.errors import ConfigError
from cache_store.program.running import usable_cores
from cache_store.storage.store import is_url

Level = Literal["quick", "full", "deep"]
"""quick reads records and sizes, full every byte, deep every byte and every sample even if all hashes match."""

REMOTE_JOBS = 8
"""Least number of threads for a cache at a URL, since each mostly waits for answers."""

MAX_JOBS = 256
"""Most threads; more of them would only wait for each other."""


@dataclass(frozen=True)
class Slice:
    """Every `slices`-th shard: slices never overlap and together cover the cache, even while it grows."""

    number: int
    """In [1, slices]."""
    slices: int

    def __str__(self) -> str:
        return f"{self.number}/{self.slices}"

    def __contains__(self, shard: object) -> bool:
        return isinstance(shard, int) and shard % self.slices == self.number - 1


def parse_slice(text: str) -> Slice:
    if match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII):
        number, slices = map(int, match.groups())
        if 1 <= number <= slices:
            return Slice(number, slices)
    raise ConfigError(f"subset must be a slice N/M with N in 1..M, such as 3/20, got {text!r}")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check caches; exits 1 if anything is damaged."""

    level: Level | None = None
    """quick: records, sizes, coverage, seal. full: every file's sha256; if one is wrong, it names the rows. deep: also
    every sample's crc32c, values and id, and the statistics, to find errors made before hashing. By default quick, or
    full with `subset`.
    """
    subset: str | None = None
    """Shards to read; the others are checked at level quick. 3/20: the third of twenty slices, which together hold
    every shard once; with few shards, some slices are empty.
    """
    jobs: int | Literal["auto"] = "auto"
    """Threads that read; auto: one per core, but at least eight for a URL."""
    report: str | None = None
    """Also write the result to this JSON file, or for several caches into this folder: `sound` is true or false, and
    `error` says why a run did not end."""
    metrics: str | None = None
    """Also write the results to this file as Prometheus' textfile collector reads it: NAME.prom."""
    json: bool = field(default=False, metadata={"option": "--json"})
    """Print the result as JSON instead, in the form of a report."""

    def __post_init__(self) -> None:
        if self.jobs != "auto" and not 1 <= self.jobs <= MAX_JOBS:
            raise ConfigError(f"jobs must be auto or in [1, {MAX_JOBS}], got {self.jobs}")
        if self.subset and self.level == "quick":
            raise ConfigError(
                "subset applies to levels full and deep; level quick checks every shard, so leave subset out"
            )
        self.shards  # noqa: B018 (an invalid subset raises ConfigError here)

    @property
    def shards(self) -> Slice | None:
        return parse_slice(self.subset) if self.subset is not None else None

    @property
    def resolved_level(self) -> Level:
        return self.level or ("quick" if self.subset is None else "full")

    def threads(self, cache: str) -> int:
        if self.jobs != "auto":
            return self.jobs
        cores = 1 if self.resolved_level == "quick" else usable_cores()
        return max(cores, REMOTE_JOBS) if is_url(cache) else cores
