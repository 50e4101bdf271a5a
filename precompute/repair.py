"""`precompute repair`: mend a damaged cache to the same bytes. No other command mends."""

from dataclasses import replace
from pathlib import Path

import msgspec

from cache_store.cache.metadata import refuse_no_cache
from cache_store.errors import CacheError, ConfigError
from cache_store.log import log_info
from cache_store.messages import abridge, counted
from cache_store.program.running import usable_cores
from cache_store.storage.local import LocalStore
from cache_store.storage.store import Address, open_store
from cache_store.verify.findings import Report
from cache_store.verify.scope import Level
from cache_store.verify.verify import verify
from precompute.build.request import BuildRequest
from precompute.build.steps import Summary, build
from precompute.config import BuildConfig, RepairConfig, advising_on_moved_paths

MAX_REPORT_BYTES = 100 * 10**6
"""Most bytes of a report: half a million findings."""


def repair(cache: Address, config: RepairConfig) -> Summary:
    """Rebuild damaged shards with the source and encoder recorded in the cache, and reseal.

    Raises StaleError, and touches nothing, if source or encoder changed, or keeps the old shards if rebuilt ones
    differ; Interrupted after a signal (run the same repair again to resume). No stray file is deleted.
    """
    refuse_no_cache(open_store(cache))
    report = read_report(Path(config.report).expanduser()) if config.report else None
    rebuild = {*config.shard_numbers, *(still_damaged(cache, report) if report else ())}
    run = replace(config.run, max_reject_fraction=1.0)  # rebuilt shards reject the same samples
    with advising_on_moved_paths(cache):
        request = BuildRequest(mends=True, rebuild=rebuild, new_samples="leave out")
        return build(replace(BuildConfig.of_cache(cache), run=run), request)


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


def still_damaged(cache: Address, report: Report) -> set[int]:
    """Read the shards that a report names again; return those that are not sound now."""
    if not (named := damaged_shards(report)):
        return named
    level: Level = "deep" if report.level == "deep" else "full"
    now = verify(cache, level, subset=named, jobs=usable_cores())
    if now.shards and (sound := named - damaged_shards(now)):  # without a spec, no shard was read
        numbers = abridge([str(shard) for shard in sorted(sound)])
        log_info(f"{counted(len(sound), 'shard')} of the report found sound now, and kept: {numbers}")
        named -= sound
    return named


def damaged_shards(report: Report) -> set[int]:
    return {each.shard for each in report.findings if each.kind != "uncommitted" and each.shard is not None}
