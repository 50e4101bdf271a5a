"""`precompute repair`: build again what a verification named, and nothing else."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cache_store.errors import ConfigError
from cache_store.findings import Report
from cache_store.metadata import read_build
from precompute.acts import Acts
from precompute.build import Summary, build
from precompute.config import BuildConfig


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """What to build again."""

    report: str | None = None
    """A report that `cache-store verify --report` wrote; every shard it names is built again."""
    shards: list[int] | None = None
    """Shards to build again, by number, with or without a report: [3, 17]."""

    def __post_init__(self) -> None:
        if self.report is None and not self.shards:
            raise ConfigError("name what to repair: --report FILE (from `cache-store verify --report`) or --shards")


def repair(root: Path, config: RepairConfig) -> Summary:
    """Build the named shards again, from the sources and with the encoder that the cache remembers, and reseal.

    Raises StaleError where those have changed since, with nothing touched; Interrupted where a signal came, after
    which `precompute build` or another repair goes on.
    """
    named = {*(config.shards or ()), *(shards_of(Path(config.report)) if config.report else ())}
    build_config = BuildConfig.from_record(root, read_build(root).config)
    return build(build_config, Acts(rebuild=named, new_samples="leave out"))


def shards_of(path: Path) -> set[int]:
    """The shards that a report names; what it names of the whole cache is mended by any build."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--report {path} is not a report of `cache-store verify --report`: {error}") from None
    return {finding.shard for finding in report.findings if finding.shard is not None}
