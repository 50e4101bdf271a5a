"""What a verification reports, and what to do about it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from cache_store.errors import CacheError
from cache_store.regular_file import NOT_A_FILE
from cache_store.schema import BUILD_FILE, SPEC_FILE

Level = Literal["quick", "full"]

SHOWN = 5

UNCOMMITTED = "is missing: the shard is not committed"
STRAY = "does not belong here"
LEFTOVER = "left by a build that died"


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


def in_reading_order(finding: Finding) -> tuple[int, str, int, str]:
    """Files of the whole cache first, then shard by shard, in each file first what concerns it as a whole."""
    shard = -1 if finding.shard is None else finding.shard
    return shard, finding.file, -1 if finding.row is None else finding.row, finding.problem


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
    subset: str | None = None
    """Which shards were read in full, as asked for; None: all of them."""
    covered: int = 0
    """Of the shards, those in the subset; `samples` and `bytes` are theirs."""

    def raise_if_damaged(self) -> None:
        """CacheError naming the first few findings."""
        if self.findings:
            shown = "\n".join(f"  {finding}" for finding in self.findings[:SHOWN])
            more = f"\n  and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            raise CacheError(
                f"{self.cache} is damaged, {len(self.findings)} findings:\n{shown}{more}\n"
                f"  see all with `cache-store verify {self.cache} --level full`"
            )

    def as_dict(self, report_file: str) -> dict[str, object]:
        """For a file of that name; `next` says what to do, in the words of the command line."""
        return {**asdict(self), "next": list(self.next_steps(report_file))}

    def next_steps(self, report_file: str) -> Iterator[str]:
        """What mends the findings, first things first."""
        others = [finding for finding in self.findings if finding.problem not in (STRAY, LEFTOVER)]
        damaged = {finding.file for finding in others}
        yield from self._in_the_way(sorted(finding.file for finding in others if finding.problem == NOT_A_FILE))
        if BUILD_FILE in damaged:
            yield f"rerun the `precompute build` that made the cache: it writes {BUILD_FILE} again, which repair needs"
            damaged.remove(BUILD_FILE)
        if SPEC_FILE in damaged:
            yield f"precompute repair {self.cache} --report {report_file}"
            yield f"verify again: without {SPEC_FILE} nothing else could be checked"
        elif any(finding.problem == UNCOMMITTED for finding in others):
            yield "rerun the `precompute build` that made the cache: it builds what is missing"
        elif damaged:
            yield f"precompute repair {self.cache} --report {report_file}"

    def _in_the_way(self, replaced: list[str]) -> Iterator[str]:
        """What lies where a file or a folder of the cache belongs, and what belongs nowhere."""
        if replaced:
            yield f"move {self.cache}/{replaced[0]}{and_more(replaced)} away: a file of the cache belongs there"
        below = tuple(f"{name}/" for name in replaced)
        strays = [finding.file for finding in self.findings if finding.problem in (STRAY, LEFTOVER)]
        strays = [name for name in strays if not name.startswith(below)]
        if strays:
            yield f"delete {self.cache}/{strays[0]}{and_more(strays)}, unless a build is running"


def and_more(names: list[str]) -> str:
    return f" and {len(names) - 1:,} more that the report lists" if len(names) > 1 else ""
