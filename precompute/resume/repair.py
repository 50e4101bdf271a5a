"""`precompute repair`: build again what a verification named, and nothing else."""

import shlex
from pathlib import Path

import msgspec

from cache_store.cache.metadata import refuse_no_cache
from cache_store.errors import ConfigError
from cache_store.refusal import differing, refuse
from cache_store.verify.findings import Report
from precompute.build import Summary, build
from precompute.config import BuildConfig, RepairConfig, where_remembered
from precompute.resume.kept import sound_seal
from precompute.resume.request import Acts


def repair(root: Path, config: RepairConfig) -> Summary:
    """Build the named shards again, from the sources and with the encoder that the cache remembers, and reseal.

    Raises StaleError where those have changed since, or the report is another cache's, with nothing touched; or where
    shards do not come out as they were, which are left as they are; Interrupted where a signal came, after which
    the same repair goes on.
    """
    refuse_no_cache(root)
    rebuild = {*config.named, *(shards_of(Path(config.report).expanduser(), root) if config.report else ())}
    build_config = BuildConfig.of_cache(root)
    with where_remembered(root):
        return build(build_config, Acts(rebuild=rebuild, new_samples="leave out"))


def shards_of(path: Path, root: Path) -> set[int]:
    """The damaged shards that a report names; what lacks, of shards and of the whole cache, is mended by any build."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--report {path} is not a report of `cache-store verify --report`: {error}") from None
    refuse_other_report(path, report, root)
    damaged = (finding for finding in report.findings if finding.kind != "uncommitted")
    return {finding.shard for finding in damaged if finding.shard is not None}


def refuse_other_report(path: Path, report: Report, root: Path) -> None:
    """StaleError where both seals were sound and are not the same; what one of them says can be damaged."""
    seal = sound_seal(root)
    if seal is None or report.identity in (None, seal.identity):
        return
    before = {"folder": report.cache, "cache identity": report.identity}
    differences = differing(before, {"folder": str(root), "cache identity": seal.identity})
    remedy = f"verify the cache as it is now: cache-store verify {shlex.quote(str(root))} --level full --report FILE"
    refuse(f"{path} is not a report of {root} as it is; it is untouched", differences, [remedy], held="in the report")
