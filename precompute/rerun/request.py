"""What one run of a build is asked to do besides going on; no property of the cache."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cache_store.verify.findings import Report


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Flags of one `precompute build` run, and what a repair asks of it."""

    new_samples: Literal["refuse", "append", "leave out"] = "refuse"
    """What becomes of samples that the source's list has gained since the cache was planned."""
    retry_rejected: bool = False
    """Try rejected samples again; without it they stay rejected."""
    check_sources: bool = False
    """Read every image again, rather than those only whose file or zip member looks changed."""
    rebuild: Collection[int] = ()
    """Shards to build again though they seem to fit."""
    report: Report | None = None
    """Of the verification that named them; of this very cache."""
    command: tuple[str, ...] = ("precompute", "build", "--config", "CONFIG")
    """What was typed, so that messages can name the very command that fits."""

    @property
    def asks_for_more(self) -> bool:
        """Whether more is to be done than what is left of a build."""
        return self.new_samples != "refuse" or bool(
            self.retry_rejected or self.check_sources or self.rebuild or self.report
        )

    def with_options(self, *options: str) -> str:
        """The command that was typed, with a flag, or an option and its value, in place of its own."""
        valued, flags = (options[:1], ()) if len(options) > 1 else ((), options)
        return shlex.join([*without_options(self.command, valued, flags), *options])

    def of(self, command: str) -> str:
        """Another command of the same config."""
        return shlex.join(["precompute", command, *self.command[2:]])

    @property
    def alone(self) -> str:
        """The build of the same config by one process, wherever it is typed."""
        return f"{self.of('build')} --rank 0 --world-size 1"


def without_options(typed: Sequence[str], valued: Collection[str], flags: Collection[str]) -> Iterator[str]:
    """The words typed, but for these options, those of `valued` with their values."""
    words = iter(typed)
    for word in words:
        if word in valued:
            next(words, None)
        elif word not in flags and word.partition("=")[0] not in valued:
            yield word
