"""The findings of a verification, and the steps that repair them."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from cache_store.errors import CacheError, NotAFileError
from cache_store.format.layout import BUILD_FILE, SPEC_FILE
from cache_store.messages import MADE_BY, SEALED_BY, counted, printable
from cache_store.storage.store import Store
from cache_store.verify.scope import Level

Kind = Literal["damaged", "replaced", "uncommitted", "unsealed", "stray"]
"""Kinds of findings, by their remedy. `replaced`: something else is in the place of a file or folder. `uncommitted`,
`unsealed`: a build has not finished this shard, or the cache. `stray`: a file that is not the cache's. `damaged`: all
others.
"""

LEFTOVER = "left by a build that died"
"""Problem of a stray file that the next build deletes."""

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of damage, named as closely as it can be."""

    file: str
    problem: str
    """Text for people; programs decide by `kind`."""
    shard: int | None = None
    row: int | None = None
    kind: Kind = "damaged"

    def __str__(self) -> str:
        shard = "" if self.shard is None else f"shard {self.shard}, "
        row = "" if self.row is None else f"row {self.row}, "
        return f"{shard}{row}{printable(self.file)}: {printable(self.problem)}"


def damage_finding(error: CacheError | OSError, store: Store, file: str, shard: int | None = None) -> Finding:
    is_missing = isinstance(error, OSError)
    problem = "is missing" if is_missing else str(error).removeprefix(f"{store.where(file)} ")
    kind: Kind = "replaced" if isinstance(error, NotAFileError) else "damaged"
    return Finding(shard=shard, file=file, problem=problem, kind=kind)


def in_reading_order(finding: Finding) -> tuple[int, str, int, str]:
    """Sort key: files of the whole cache first, then by shard; in each file, findings about the whole file first."""
    shard = -1 if finding.shard is None else finding.shard
    return shard, finding.file, -1 if finding.row is None else finding.row, finding.problem


@dataclass(frozen=True, kw_only=True)
class Report:
    """The scope and the findings of a verification."""

    cache: str
    level: Level
    identity: str | None = None
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    findings: tuple[Finding, ...] = ()
    subset: str | None = None
    """The subset that was requested; None for all shards."""
    covered: int = 0
    """Number of shards that were read at the level; `samples` and `bytes` count only these."""
    error: str | None = None
    """Why the verification did not end."""

    @property
    def sound(self) -> bool:
        return self.error is None and not self.findings

    def raise_if_damaged(self) -> None:
        """Raise CacheError with the first few findings, if there are any."""
        if self.findings:
            shown = "\n".join(f"  {finding}" for finding in self.findings[:SHOWN])
            more = f"\n  and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            raise CacheError(
                f"{self.cache} is damaged, {counted(len(self.findings), 'finding')}:\n{shown}{more}\n"
                f"  see all with `cache-store verify {shlex.quote(self.cache)} --level full`"
            )

    def as_dict(self, report_file: str) -> dict[str, object]:
        """Return the report for the JSON file `report_file`; its `next` lists what to run if it ended."""
        findings = [asdict(replace(finding, file=printable(finding.file))) for finding in self.findings]
        steps = [] if self.error else self.next_steps(report_file)
        return {"sound": self.sound, **asdict(self), "findings": findings, "next": list(steps)}

    def next_steps(self, report_file: str) -> Iterator[str]:
        """Yield the steps that repair the findings, in order."""
        damaged = {finding.file for finding in self.findings if finding.kind != "stray"}
        replaced = self._files("replaced")
        if replaced:
            yield f"move {self._path(replaced[0])}{and_more(replaced)} away: the cache's own belongs there"
        unfinished = {*self._files("uncommitted"), *self._files("unsealed")}
        to_mend = damaged - {BUILD_FILE} - unfinished
        if BUILD_FILE in damaged and (to_mend or not unfinished):
            yield f"rerun the {MADE_BY}: it writes {BUILD_FILE} again, which repair needs"
        below = tuple(f"{name}/" for name in replaced)
        is_rerun = BUILD_FILE in damaged or unfinished
        cleared = [finding.file for finding in self.findings if is_rerun and finding.problem == LEFTOVER]
        strays = [name for name in self._files("stray") if not name.startswith(below) and name not in cleared]
        if strays:
            yield f"delete {self._path(strays[0])}{and_more(strays)}, unless a build is running"
        if to_mend:
            yield f"precompute repair {shlex.quote(self.cache)} --report {shlex.quote(report_file)}"
        if unfinished:  # after the repair: a build refuses a damaged cache
            yield f"rerun the {SEALED_BY}: it builds and seals what is missing"
        if SPEC_FILE in damaged:
            yield f"verify again: without {SPEC_FILE} nothing else could be checked"

    def _files(self, kind: Kind) -> list[str]:
        return sorted(finding.file for finding in self.findings if finding.kind == kind)

    def _path(self, name: str) -> str:
        return shlex.quote(printable(f"{self.cache}/{name}"))


def and_more(names: list[str]) -> str:
    return f" and {len(names) - 1:,} more (--report lists all)" if len(names) > 1 else ""
