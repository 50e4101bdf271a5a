"""The `verify` command: its progress bar, its table of findings, its report."""

import gc
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from cache_store.cache.metadata import read_spec, refuse_no_cache
from cache_store.errors import CacheError, ConfigError, EncodeOnceError
from cache_store.log import is_plain, log_about, log_error, log_info, log_warning
from cache_store.messages import align_rows, counted, printable
from cache_store.program.output_file import error_text, json_report, refuse_output
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import is_url, local_path, open_store
from cache_store.verify.findings import Finding, Report
from cache_store.verify.metrics import write_metrics
from cache_store.verify.scope import VerifyConfig
from cache_store.verify.verify import verify

SHOWN_FINDINGS = 50

FILE = "FILE"
"""Name of the report in a printed command, if none was written."""


def run_verify(caches: Sequence[str], config: VerifyConfig) -> int:
    """Verify caches, print and report the results; return 1 if one is not sound, else 2 if one is not there."""
    files, metrics = report_files(caches, config.report), config.metrics and local_path("metrics", config.metrics)
    if metrics:
        for cache in caches:
            refuse_output("metrics", metrics, cache)
    reports, codes = dict[str, tuple[Report, float]](), {0}
    for cache in caches:
        if len(caches) > 1 and not config.json:
            print(f"{cache}:", flush=True)
        log_about(cache=cache)
        began = time.time()
        try:
            report = verify_one(cache, config, files[cache])
            codes.add(int(not report.sound))
        except (EncodeOnceError, OSError) as error:
            if len(caches) == 1 and not metrics:
                raise
            log_error(error_text(error))
            codes.add(getattr(error, "exit_code", 1))
            report = stopped(cache, config, error_text(error))
        reports[cache] = report, began
        if metrics:
            write_metrics(metrics, reports)
    return 1 if 1 in codes else max(codes)


def report_files(caches: Sequence[str], report: str | None) -> dict[str, str | None]:
    """Name the report of each cache, in a folder by the last two parts of its place; ConfigError for one of two."""
    if report is None or not (folder := Path(report).expanduser()).is_dir():
        if report is not None and len(caches) > 1:
            raise ConfigError(f"report: {report} is no folder; for several caches, name a folder that exists")
        return dict.fromkeys(caches, report)
    places = [cache if is_url(cache) else str(Path(cache).expanduser().resolve()) for cache in caches]
    files = [str(folder / f"{'-'.join(place.strip('/').split('/')[-2:])}.json") for place in places]
    if len({*files}) < len(files):
        raise ConfigError(f"report: two caches would be written to one file in {report}; verify each alone")
    return dict(zip(caches, files, strict=True))


def verify_one(cache: str, config: VerifyConfig, report_file: str | None) -> Report:
    def failed(error: str) -> dict[str, object]:
        return stopped(cache, config, error).as_dict(FILE)

    with json_report("cache-store verify", report_file, cache, failed, prints=config.json) as fields:
        report = verify_with_a_bar(cache, config)
        fields.update(report.as_dict(report_file or FILE))
        log_report(report)
        if not config.json:
            show_report(report, report_file)
    return report


def stopped(cache: str, config: VerifyConfig, error: str) -> Report:
    return Report(cache=cache, level=config.resolved_level, subset=config.subset, error=error)


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
    for step in report.next_steps(report_file or FILE):
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
    files = Counter(finding.file for finding in findings)
    shards = {finding.shard for finding in findings} - {None}
    rows = {(finding.shard, finding.row) for finding in findings if finding.row is not None}
    counts = {"finding": len(findings), "file": len(files), "shard": len(shards), "row": len(rows)}
    parts = [counted(count, name) for name, count in counts.items()]
    return f"{parts[0]} ({', '.join(parts[1:])})"
