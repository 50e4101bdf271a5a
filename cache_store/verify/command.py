"""The `verify` command: options, progress bar, and table of findings."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.cache.info import SHOWN_MAKERS
from cache_store.cache.metadata import read_spec, refuse_no_cache
from cache_store.errors import CacheError, ConfigError, EncodeOnceError, Interrupted
from cache_store.log import is_plain, log_info, log_warning
from cache_store.messages import counted, printable
from cache_store.program.output_file import ReportFile, error_text
from cache_store.program.progress_bar import ProgressBar
from cache_store.program.running import usable_cores
from cache_store.storage.store import is_url, open_store
from cache_store.verify.findings import Finding, Level, Report, Subset, as_text, empty_report, parse_subset
from cache_store.verify.shard import CheckedShard
from cache_store.verify.verify import verify

SHOWN_FINDINGS = 50

FILE = "FILE"
"""Name of the report in a printed command, if none was written."""

REMOTE_JOBS = 8
"""Least number of threads for a cache at a URL, since each mostly waits for answers."""

MAX_JOBS = 256
"""Most threads; more of them would only wait for each other."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check a cache; exits 1 if anything is damaged."""

    level: Level | None = None
    """quick: records, sizes, coverage, seal. full: every file's sha256; if one is wrong, it names the rows. deep: also
    every sample's crc32c, values and id, and the statistics, to find errors made before hashing. By default quick, or
    full with a subset.
    """
    subset: str | None = None
    """Shards to read; the others are checked at level quick. 3/20: the third of twenty slices, which together hold
    every shard once; with few shards, some slices are empty. 5%: always the same share, like 1/20.
    """
    jobs: int | Literal["auto"] = "auto"
    """Threads that read; auto: one per core, but at least eight for a URL."""
    report: str | None = None
    """Also write the result to this JSON file: `sound` is true or false, and `error` says why a run did not end."""
    json: bool = field(default=False, metadata={"option": "--json"})
    """Print the result as JSON instead, in the form of a report."""

    def __post_init__(self) -> None:
        if self.jobs != "auto" and not 1 <= self.jobs <= MAX_JOBS:
            raise ConfigError(f"jobs must be auto or in [1, {MAX_JOBS}], got {self.jobs}")
        if self.subset and self.level == "quick":
            raise ConfigError(
                "subset applies to levels full and deep; level quick checks every shard, so leave subset out"
            )
        self.shards  # noqa: B018 (an invalid subset raises ConfigError here)

    @property
    def shards(self) -> Subset | None:
        return parse_subset(self.subset) if self.subset is not None else None

    @property
    def resolved_level(self) -> Level:
        return self.level or ("full" if self.subset is not None else "quick")

    def threads(self, cache: str) -> int:
        if self.jobs != "auto":
            return self.jobs
        cores = 1 if self.resolved_level == "quick" else usable_cores()
        return max(cores, REMOTE_JOBS) if is_url(cache) else cores


def run_verify(cache: str, config: VerifyConfig) -> int:
    """Verify a cache, print and report the result, and return the exit code."""

    def failed(error: str) -> dict[str, object]:
        return empty_report(cache, config.resolved_level, config.subset, error).as_dict(FILE)

    with ReportFile("cache-store verify", config.report, cache, failed) as out:
        try:
            report = verify_with_bar(cache, config)
        except (EncodeOnceError, OSError) as error:
            if config.json:
                print(out.document(failed(error_text(error))), end="")
            raise
        out.result = report.as_dict(config.report or FILE)
        log_report(report)
        if config.json:
            print(out.document(out.result), end="")
        else:
            show_report(report, config.report)
    return 0 if report.sound else 1


def verify_with_bar(cache: str, config: VerifyConfig) -> Report:
    level, subset, read, started = config.resolved_level, config.shards, 0, time.monotonic()

    def show(checked: CheckedShard) -> None:
        nonlocal read
        if checked.task.level != level:
            return  # outside the subset
        read += checked.bytes
        speed = read / 1e9 / max(time.monotonic() - started, 1e-9)
        bar.update(note="" if level == "quick" else f"{speed:.2f} GB/s")

    refuse_no_cache(open_store(cache))  # first, so that a store that does not answer is waited for only once
    try:
        spec = read_spec(cache)
        total = sum(subset is None or shard in subset for shard in range(spec.num_shards))
    except (CacheError, OSError):
        total = 0  # verify reports the problem
    try:
        with ProgressBar(f"verify {level}", total, "shard") as bar:
            gc.freeze()  # otherwise the collector scans all loaded modules every few shards, a tenth of the time
            return verify(cache, level, subset=subset, jobs=config.threads(cache), progress=show)
    except KeyboardInterrupt:  # SIGTERM as well as SIGINT; verification only reads, so it can be left at any instant
        raise Interrupted("nothing was changed; run the same command again, or slices of it with --subset") from None


def show_report(report: Report, report_file: str | None) -> None:
    shards = counted(report.shards, "shard")
    checked = f"{report.covered:,} of {shards}" if report.subset else shards
    checked += f", {counted(report.samples, 'sample')}, {report.bytes:,} bytes"
    level = f"{report.level}, subset {report.subset}" if report.subset else report.level
    if report.subset and not report.covered:
        print(f"{report.subset} of {shards} is no shard: all were checked at level quick")
    if len(report.made_by) > 1:
        print(f"shards were made by {len(report.made_by):,} kinds of hardware or libraries:")
        for maker, made in sorted(report.made_by.items(), key=lambda each: -each[1])[:SHOWN_MAKERS]:
            print(f"  {counted(made, 'shard')}: {printable(maker)}")
    if not report.findings:
        print(f"sound ({level}): {checked}\ncache identity {report.identity}")
        return
    uncommitted = [finding for finding in report.findings if finding.kind == "uncommitted"]
    show_findings([finding for finding in report.findings if finding.kind != "uncommitted"])
    if uncommitted:
        print(f"unfinished: {len(uncommitted):,} of {shards} not committed")
    print(f"not sound ({level}): {summary(report.findings)} in {checked}")
    first = "" if report_file else f"write the findings down with --report {FILE}, then "
    for step in report.next_steps(report_file or FILE, "the report" if report_file else f"`--report {FILE}`"):
        print(f"next: {first if step.startswith('precompute') else ''}{step}")


COUNTED = ("sound", "level", "subset", "identity", "shards", "covered", "samples", "bytes")
"""Fields of a report in the log."""


def log_report(report: Report) -> None:
    """Log the findings and the result, unless messages are plain."""
    if is_plain():
        return
    for finding in report.findings:
        log_warning(str(finding), finding=asdict(replace(finding, file=as_text(finding.file))))
    result = f"not sound: {summary(report.findings)}" if report.findings else "sound"
    counts = {name: getattr(report, name) for name in COUNTED}
    log_info(f"{result} ({report.level})", verify={**counts, "findings": len(report.findings)})


def summary(findings: Sequence[Finding]) -> str:
    """Count the findings and the files, shards and rows that they name."""
    files = Counter(finding.file for finding in findings)
    shards = {finding.shard for finding in findings} - {None}
    rows = {(finding.shard, finding.row) for finding in findings if finding.row is not None}
    counts = {"finding": len(findings), "file": len(files), "shard": len(shards), "row": len(rows)}
    parts = [counted(count, name) for name, count in counts.items()]
    return f"{parts[0]} ({', '.join(parts[1:])})"


def show_findings(findings: Sequence[Finding]) -> None:
    table = Table("shard", "row", "file", "problem", box=None)
    for finding in findings[:SHOWN_FINDINGS]:
        place = ["" if value is None else str(value) for value in (finding.shard, finding.row)]
        table.add_row(*place, Text(printable(finding.file)), Text(printable(finding.problem)))
    # A pipe has no width; this is wide enough to keep each finding on one line.
    Console(highlight=False, width=None if sys.stdout.isatty() else 300).print(table)
    if (more := len(findings) - SHOWN_FINDINGS) > 0:
        print(f"and {more:,} more; --report FILE writes them all")
