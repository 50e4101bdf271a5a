"""The `verify` command: its progress bar, its table of findings, its report."""

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from cache_store.cache.metadata import read_spec, refuse_no_cache
from cache_store.errors import CacheError
from cache_store.log import is_plain, log_info, log_warning
from cache_store.messages import align_rows, counted, printable
from cache_store.program.output_file import json_report
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import open_store
from cache_store.verify.findings import Finding, Report, empty_report
from cache_store.verify.scope import VerifyConfig
from cache_store.verify.verify import verify

SHOWN_FINDINGS = 50

FILE = "FILE"
"""Name of the report in a printed command, if none was written."""


def run_verify(cache: str, config: VerifyConfig) -> int:
    """Verify a cache, print and report the result, and return the exit code: 1 if it is not sound."""

    def failed(error: str) -> dict[str, object]:
        return empty_report(cache, config.resolved_level, config.subset, error).as_dict(FILE)

    with json_report("cache-store verify", config.report, cache, failed, prints=config.json) as fields:
        report = verify_with_a_bar(cache, config)
        fields.update(report.as_dict(config.report or FILE))
        log_report(report)
        if not config.json:
            show_report(report, config.report)
    return int(not report.sound)


def verify_with_a_bar(cache: str, config: VerifyConfig) -> Report:
    store, level, num_shards = open_store(cache), config.resolved_level, 0
    refuse_no_cache(store)  # first, so that a silent store is waited for only once
    with suppress(CacheError, OSError):  # verify reports the problem
        num_shards = read_spec(store).num_shards
    total = sum(config.shards is None or shard in config.shards for shard in range(num_shards))
    with ProgressBar(f"verify {level}", total, "shard") as bar:
        gc.freeze()  # otherwise the collector scans all loaded modules every few shards, a tenth of the time
        return verify(
            cache,
            level,
            subset=config.shards,
            jobs=config.threads(cache),
            progress=lambda each: bar.update(int(each.task.level == level)),
        )


def show_report(report: Report, report_file: str | None) -> None:
    shards = counted(report.shards, "shard")
    checked = f"{report.covered:,} of {shards}" if report.covered < report.shards else shards
    checked += f", {counted(report.samples, 'sample')}, {report.bytes:,} bytes"
    level = f"{report.level}, subset {report.subset}" if report.subset else report.level
    if report.sound:
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


def show_findings(findings: Sequence[Finding]) -> None:
    rows = [("shard", "row", "file", "problem")]
    for each in findings[:SHOWN_FINDINGS]:
        shard, row = ("" if value is None else str(value) for value in (each.shard, each.row))
        rows.append((shard, row, printable(each.file), printable(each.problem)))
    print(*align_rows(rows), sep="\n")
    if (more := len(findings) - SHOWN_FINDINGS) > 0:
        print(f"and {more:,} more; --report FILE writes them all")


COUNTED = ("sound", "level", "subset", "identity", "shards", "covered", "samples", "bytes")
"""Fields of a report in the log."""


def log_report(report: Report) -> None:
    """Log the findings and the result, unless messages are plain."""
    if is_plain():
        return
    for finding in report.findings:
        log_warning(str(finding), finding=asdict(replace(finding, file=printable(finding.file))))
    result = "sound" if report.sound else f"not sound: {summary(report.findings)}"
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
