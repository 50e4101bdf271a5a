"""The flags of one build run; no part of the cache."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from cache_store.program.command_line import drop_options


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
    command: tuple[str, ...] = ("precompute", "build", "--config", "CONFIG")
    """The command typed, so that messages can suggest a command that fits."""

    @property
    def has_extra_work(self) -> bool:
        return self.new_samples == "append" or self.mends or self.retry_rejected or self.check_sources

    def with_options(self, *options: str) -> str:
        """Return the command typed, with this flag, or this option and value, added or replaced."""
        valued, flags = (options[:1], ()) if len(options) > 1 else ((), options)
        return shlex.join([*drop_options(self.command, valued, flags), *options])

    def other_command(self, command: str) -> str:
        return shlex.join(["precompute", command, *self.command[2:]])
