"""What one run of a build is asked to do besides going on: acts of that run, not properties of the cache."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Acts:
    """Flags of `precompute build`, and what a repair asks of a build."""

    new_samples: Literal["refuse", "append", "leave out"] = "refuse"
    """What becomes of samples that the source's list has gained since the cache was planned."""
    retry_rejected: bool = False
    """Try rejected samples again; without it they stay rejected."""
    check_sources: bool = False
    """Read every image again, rather than those only whose file or zip member looks changed."""
    rebuild: Collection[int] = ()
    """Shards to build again though they seem to fit."""
    command: tuple[str, ...] = ("precompute", "build", "--config", "CONFIG")
    """What was typed, so that messages can name the very command that fits."""

    def with_options(self, *options: str) -> str:
        """The command that was typed, with further options."""
        return shlex.join([*self.command, *options])
