"""What a verification reports, and what to do about it."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from cache_store.errors import CacheError, NotAFileError
from cache_store.format.names import BUILD_FILE, SPEC_FILE
from cache_store.refusal import MADE_BY, SEALED_BY, counted, printable
from cache_store.storage.store import Store

Level = Literal["quick", "full", "deep"]
"""How much is read: records and sizes; every byte; every byte, and every sample whatever the hashes say."""

Kind = Literal["damaged", "replaced", "uncommitted", "unsealed", "stray"]
"""What tells findings apart that are mended in different ways: `replaced` is a file in whose place something else lies,
`uncommitted` a shard and `unsealed` a cache that a build has not finished, `stray` what belongs nowhere."""

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of damage, named as closely as it can be."""

    file: str
    problem: str
    """For people; what a program does about it hangs on `kind`."""
    shard: int | None = None
    row: int | None = None
    kind: Kind = "damaged"

    def __str__(self) -> str:
        shard = "" if self.shard is None else f"shard {self.shard}, "
        row = "" if self.row is None else f"row {self.row}, "
        return f"{shard}{row}{printable(self.file)}: {printable(self.problem)}"


def nothing_read(cache: str, level: Level, subset: str | None, error: str | None = None) -> "Report":
    """A report before anything is read."""
    return Report(
        cache=cache, level=level, subset=subset, identity=None, shards=0, samples=0, bytes=0, findings=(), error=error
    )


def unreadable(error: CacheError | OSError, store: Store, file: str, shard: int | None = None) -> Finding:
    """What whoever read a file ran into; a finding names the file itself."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        problem = "is missing"
    elif isinstance(error, OSError):
        problem = f"cannot be read: {error.strerror}"
    else:
        problem = str(error).removeprefix(f"{store.where(file)} ")
    kind: Kind = "replaced" if isinstance(error, NotAFileError) else "damaged"
    return Finding(shard=shard, file=file, problem=problem, kind=kind)


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
    """Which shards were read, as asked for; None: all of them."""
    covered: int = 0
    """Of the shards, those in the subset; `samples` and `bytes` are theirs."""
    made_by: dict[str, int] = field(default_factory=dict)
    """Hardware and libraries, with the number of shards that they made: as their records say."""
    error: str | None = None
    """Why the verification did not end; what it found is then unknown."""

    @property
    def sound(self) -> bool:
        return self.error is None and not self.findings

    def raise_if_damaged(self) -> None:
        """CacheError naming the first few findings."""
        if self.findings:
            shown = "\n".join(f"  {finding}" for finding in self.findings[:SHOWN])
            more = f"\n  and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            raise CacheError(
                f"{self.cache} is damaged, {counted(len(self.findings), 'finding')}:\n{shown}{more}\n"
                f"  see all with `cache-store verify {shlex.quote(self.cache)} --level full`"
            )

    def as_dict(self, report_file: str) -> dict[str, object]:
        """For a file of that name; `next` says what to do, in the words of the command line."""
        return {"sound": self.sound, **asdict(self), "next": list(self.next_steps(report_file))}

    def next_steps(self, report_file: str) -> Iterator[str]:
        """What mends the findings, first things first."""
        damaged = {finding.file for finding in self.findings if finding.kind != "stray"}
        yield from self._in_the_way()
        reasons = [f"writes {BUILD_FILE} again, which repair needs"] if BUILD_FILE in damaged else []
        unfinished = {*self._files("uncommitted"), *self._files("unsealed")}
        reasons += ["builds and seals what is missing"] if unfinished else []
        if reasons:  # before the repair, which would build what is missing without the build's limits and workers
            yield f"rerun the {SEALED_BY if unfinished else MADE_BY}: it {' and '.join(reasons)}"
            damaged -= {BUILD_FILE, *unfinished}
        if damaged:
            yield f"precompute repair {shlex.quote(self.cache)} --report {shlex.quote(report_file)}"
        if SPEC_FILE in damaged:
            yield f"verify again: without {SPEC_FILE} nothing else could be checked"

    def _in_the_way(self) -> Iterator[str]:
        """What lies where a file or a folder of the cache belongs, and what belongs nowhere."""
        replaced = self._files("replaced")
        if replaced:
            yield f"move {self._path(replaced[0])}{and_more(replaced)} away: a file of the cache belongs there"
        below = tuple(f"{name}/" for name in replaced)
        strays = [name for name in self._files("stray") if not name.startswith(below)]
        if strays:
            yield f"delete {self._path(strays[0])}{and_more(strays)}, unless a build is running"

    def _files(self, kind: Kind) -> list[str]:
        return sorted(finding.file for finding in self.findings if finding.kind == kind)

    def _path(self, name: str) -> str:
        return shlex.quote(printable(f"{self.cache}/{name}"))


def and_more(names: list[str]) -> str:
    return f" and {len(names) - 1:,} more that the report lists" if len(names) > 1 else ""
