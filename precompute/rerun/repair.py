"""`precompute repair`: build again what a verification named, and nothing else."""

import shlex
from pathlib import Path

import msgspec

from cache_store.cache.metadata import refuse_no_cache
from cache_store.errors import CacheError, ConfigError
from cache_store.refusal import counted, printable
from cache_store.storage.store import Address, is_url, open_store
from cache_store.verify.findings import SHOWN, Report
from precompute.config import BuildConfig, RepairConfig, where_remembered
from precompute.rerun.build import Summary, build
from precompute.rerun.request import BuildRequest


def repair(cache: Address, config: RepairConfig) -> Summary:
    """Build the named shards again, from the sources and with the encoder that the cache remembers, and reseal.

    Raises StaleError where those have changed since, or the report is another cache's, with nothing touched; or where
    shards do not come out as they were, which are left as they are; Interrupted where a signal came, after which
    the same repair goes on.
    """
    refuse_no_cache(open_store(cache))
    report = read_report(Path(config.report).expanduser()) if config.report else None
    rebuild = {*config.named, *(shards_of(report) if report else ())}
    build_config = BuildConfig.of_cache(cache)
    with where_remembered(cache):
        return build(build_config, BuildRequest(rebuild=rebuild, new_samples="leave out", report=report))


def refuse_strays(cache: Address, config: RepairConfig) -> None:
    """CacheError where something lies in the cache still that the report names, and that no repair deletes."""
    if not config.report:
        return
    store, report = open_store(cache), read_report(Path(config.report).expanduser())
    left = [each.file for each in report.findings if each.kind == "stray" and store.has(each.file)]
    if left:
        named = [shlex.quote(printable(store.where(name))) for name in left[:SHOWN]]
        more = f"\n  and {len(left) - SHOWN:,} more that the report names" if len(left) > SHOWN else ""
        command = "delete:\n  " if is_url(cache) else "run:\n  rm -r -- "
        raise CacheError(
            f"all is mended but for {counted(len(left), 'stray')} of the report, which no command deletes; unless a "
            f"build is running, {command}{' '.join(named)}{more}"
        )


def read_report(path: Path) -> Report:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--report {path} is not a report of `cache-store verify --report`: {error}") from None
    if report.error is not None:
        raise ConfigError(
            f"--report {path} names no damage, since that verification failed: {report.error}; verify again"
        )
    return report


def shards_of(report: Report) -> set[int]:
    """The damaged shards that a report names; what lacks, of shards and of the whole cache, is mended by any build."""
    damaged = (finding for finding in report.findings if finding.kind != "uncommitted")
    return {finding.shard for finding in damaged if finding.shard is not None}
