"""The flags of one build run, and the report that a repair goes by; neither is part of the cache."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cache_store.errors import CacheError, ConfigError
from cache_store.storage.local import LocalStore
from cache_store.verify.findings import Report

MAX_REPORT_BYTES = 100 * 10**6
"""Most bytes of a report: half a million findings."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Flags of one `precompute build` run, and the shards that a repair rebuilds."""

    new_samples: Literal["refuse", "append", "leave out"] = "refuse"
    """How to treat samples that are new in the source since the cache was planned."""
    retry_rejected: bool = False
    """Try rejected samples again; without it they stay rejected."""
    check_sources: bool = False
    """Read every image again, not only those whose file or zip member looks changed."""
    mends: bool = False
    """Whether this is a repair: any other run refuses a damaged cache."""
    rebuild: Collection[int] = ()
    """Shards to build again though they seem to fit."""
    report: Report | None = None
    """The verification report that named them; it must be of this cache."""
    command: tuple[str, ...] = ("precompute", "build", "--config", "CONFIG")
    """The command typed, so that messages can suggest a command that fits."""

    @property
    def has_extra_work(self) -> bool:
        """Whether this run has to do more than resume the build."""
        return self.new_samples == "append" or self.mends or self.retry_rejected or self.check_sources

    def with_options(self, *options: str) -> str:
        """Return the command typed, with this flag, or this option and value, added or replaced."""
        valued, flags = (options[:1], ()) if len(options) > 1 else ((), options)
        return shlex.join([*drop_options(self.command, valued, flags), *options])

    def other_command(self, command: str) -> str:
        """Return another `precompute` command with the same options."""
        return shlex.join(["precompute", command, *self.command[2:]])


def drop_options(typed: Sequence[str], valued: Collection[str], flags: Collection[str]) -> Iterator[str]:
    """Yield the words typed, without these options and the values of those in `valued`."""
    words = iter(typed)
    for word in words:
        if word in valued:
            next(words, None)
        elif word not in flags and word.partition("=")[0] not in valued:
            yield word


def read_report(path: Path) -> Report:
    """Read the report of a verification; raise ConfigError if it is not one, or that verification failed."""
    try:
        data = LocalStore(path.parent).read(path.name, MAX_REPORT_BYTES)
        report = msgspec.json.decode(data, type=Report)
    except (OSError, CacheError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--report {path} is not a report of `cache-store verify --report`: {error}") from None
    if report.error is not None:
        raise ConfigError(f"--report {path}: that verification did not end: {report.error}; verify again")
    return report


def damaged_shards(report: Report) -> set[int]:
    """List the damaged shards that a report names; every build mends uncommitted shards and metadata anyway."""
    damaged = (finding for finding in report.findings if finding.kind != "uncommitted")
    return {finding.shard for finding in damaged if finding.shard is not None}
