"""Where a verification with a time limit goes on: it reads a cache in rounds, some shards a night.

One file keeps the places of any number of caches. A round that found nothing in all its shards has verified the cache.
"""

from datetime import datetime
from pathlib import Path

import msgspec

from cache_store.errors import ConfigError
from cache_store.program.output_file import write_result
from cache_store.verify.findings import Report

MAX_DAMAGED = 10_000
"""Most damaged shards that are kept of a cache."""


class Place(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How far the round of one cache has come."""

    identity: str | None = None
    """A cache that was built again begins a new round."""
    shard: int = 0
    """The next shard to read."""
    began: str = ""
    """When the round began."""
    damaged: tuple[int, ...] = ()
    """Shards in which something was found; they are read again each time, until they are sound."""
    verified: str = ""
    """When the last whole round without findings began; everything that it read was sound since then."""


class Rounds(msgspec.Struct, kw_only=True):
    """The places of caches by their paths, and the cache in which the last run ended."""

    places: dict[str, Place] = {}
    last: str = ""

    def in_turn(self, caches: list[str]) -> list[str]:
        """Return the caches, first the one in which the last run ended."""
        first = caches.index(self.last) if self.last in caches else 0
        return caches[first:] + caches[:first]

    def first_shard(self, cache: str, identity: str | None) -> int:
        place = self.places.get(cache, Place())
        return place.shard if place.identity == identity else 0

    def damaged(self, cache: str, identity: str | None) -> frozenset[int]:
        """Return the shards in which earlier runs found something."""
        place = self.places.get(cache, Place())
        return frozenset(place.damaged if place.identity == identity else ())

    def verified(self, cache: str) -> float | None:
        """Return when the last whole round without findings began, in seconds since 1970."""
        verified = self.places.get(cache, Place()).verified
        return datetime.fromisoformat(verified).timestamp() if verified else None

    def read(self, report: Report, time: str) -> None:
        """Take note of a verification that began at this time."""
        place = self.places.get(report.cache, Place())
        if report.first == 0 or place.identity != report.identity:
            place = Place(identity=report.identity, began=time, verified=place.verified)
        damaged = {each.shard for each in report.findings if each.shard is not None}
        if report.error is not None:
            damaged |= {*place.damaged}  # a run that was stopped may not have come to them
        place.damaged = tuple(sorted(damaged)[:MAX_DAMAGED])
        place.shard = report.first + report.covered
        if place.shard >= report.shards:
            verified = place.began if report.sound else place.verified
            place = Place(identity=place.identity, verified=verified, damaged=place.damaged)
        self.places[report.cache] = place


def read_rounds(path: Path) -> Rounds:
    """Read the file of an earlier run; ConfigError if it is another kind of file. Without a file, all rounds begin."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rounds)
    except FileNotFoundError:
        return Rounds()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cursor: {path} is not a file that `cache-store verify --cursor` wrote: {error}") from None


def write_rounds(path: Path, rounds: Rounds) -> None:
    write_result("cursor", path, msgspec.json.format(msgspec.json.encode(rounds), indent=1) + b"\n")
