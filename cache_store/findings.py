"""What a verification reports."""

from dataclasses import asdict, dataclass
from typing import Literal

from cache_store.errors import CacheError

Level = Literal["quick", "full"]

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of damage, named as closely as it can be."""

    file: str
    problem: str
    shard: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        shard = "" if self.shard is None else f"shard {self.shard}, "
        row = "" if self.row is None else f"row {self.row}, "
        return f"{shard}{row}{self.file}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verification looked at and found."""

    cache: str
    level: Level
    identity: str | None
    shards: int
    samples: int
    bytes: int
    findings: tuple[Finding, ...]

    def raise_if_damaged(self) -> None:
        """CacheError naming the first few findings."""
        if self.findings:
            shown = "\n".join(f"  {finding}" for finding in self.findings[:SHOWN])
            more = f"\n  and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            raise CacheError(
                f"{self.cache} is damaged, {len(self.findings)} findings:\n{shown}{more}\n"
                f"  to see all:   cache-store verify {self.cache} --level full --report report.json\n"
                f"  to repair it: precompute repair {self.cache} --report report.json"
            )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
