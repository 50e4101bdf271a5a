"""The `verify` command: its progress bar, and its table of findings."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.cache.info import SHOWN_MAKERS
from cache_store.cache.metadata import read_spec, refuse_no_cache
from cache_store.errors import CacheError, ConfigError, EncodeOnceError, Interrupted
from cache_store.log import is_plain, log_about, log_error, log_info, log_warning
from cache_store.messages import counted, printable
from cache_store.program.output_file import ReportFile, error_text, refuse_output
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import is_url, local_path, open_store
from cache_store.verify.findings import (
    Finding,
    Report,
    as_text,
    empty_report,
    in_reading_order,
)
from cache_store.verify.metrics import Measured, write_metrics
from cache_store.verify.scope import VerifyConfig
from cache_store.verify.shard import CheckedShard
from cache_store.verify.verify import verify

SHOWN_FINDINGS = 50

FILE = "FILE"
"""Name of the report in a printed command, if none was written."""


def run_verify(caches: Sequence[str], config: VerifyConfig) -> int:
    """Verify caches, print and report the results, and return the exit code.

    It is 1 if one is not sound, else 2 if one is not there.
    """
    reports = report_files(caches, config.report)
    metrics = output_path("metrics", config.metrics, caches)
    if metrics and metrics.suffix not in ("", ".prom"):
        log_warning(f"metrics: {metrics}: node exporter's textfile collector reads only files named NAME.prom")
    measured, codes = list[Measured](), {0}
    for cache in caches:
        if len(caches) > 1 and not config.json:
            print(f"{cache}:", flush=True)
        log_about(cache=cache)
        run = Verification(cache, config)
        try:
            run.verify(reports[cache])
        except (EncodeOnceError, OSError) as error:
            if len(caches) == 1 or isinstance(error, Interrupted):
                raise
            log_error(error_text(error))
            codes.add(getattr(error, "exit_code", 1))
        codes.add(int(bool(run.report.findings)))
        measured.append(run.measured)
        if metrics:
            write_metrics(metrics, measured)
    return 1 if 1 in codes else max(codes)


def report_files(caches: Sequence[str], report: str | None) -> dict[str, str | None]:
    """Return the report's file for each cache; ConfigError if several would have one file."""
    if report is None or not Path(report).expanduser().is_dir():
        if report is not None and len(caches) > 1:
            raise ConfigError(f"report: {report} is no folder; for several caches, name a folder that exists")
        return dict.fromkeys(caches, report)
    names = [place_of(cache).strip("/").split("/") for cache in caches]
    files = dict[str, str | None]()
    for cache, name in zip(caches, names, strict=True):
        alone = [end for end in range(1, len(name) + 1) if [each[-end:] for each in names].count(name[-end:]) == 1]
        files[cache] = str(Path(report) / f"{'-'.join(name[-alone[0] :] if alone else name)}.json")
    if len({*files.values()}) < len(caches):
        raise ConfigError(f"report: two caches would be written to one file in {report}; verify each alone")
    return files


def place_of(cache: str) -> str:
    return cache if is_url(cache) else str(Path(cache).expanduser().resolve())


def output_path(option: str, path: str | None, caches: Sequence[str]) -> Path | None:
    """Return the path of a file to write; ConfigError if it cannot be written or lies in one of the caches."""
    if path is None:
        return None
    for cache in caches:
        refuse_output(option, local_path(option, path), cache)
    return local_path(option, path)


class Verification:
    """One cache's verification; `report` is what was found so far."""

    def __init__(self, cache: str, config: VerifyConfig) -> None:
        self._cache, self._config = cache, config
        self._started, self._begun = time.monotonic(), time.time()
        self.report, self._read = empty_report(cache, config.resolved_level, config.subset), 0

    @property
    def measured(self) -> Measured:
        report = self.report
        is_whole = report.sound and report.level != "quick" and report.covered == report.shards
        verified = self._begun if is_whole else None
        seconds = time.monotonic() - self._started
        return Measured(report=report, began=self._begun, seconds=seconds, verified=verified)

    def verify(self, report_file: str | None) -> None:
        """Verify the cache, print the result and write its report."""
        config, shown = self._config, report_file or FILE

        def failed(error: str) -> dict[str, object]:
            self.report = replace(self.report, error=error)
            return self.report.as_dict(shown)

        with ReportFile("cache-store verify", report_file, self._cache, failed) as out:
            try:
                self._verify()
            except (EncodeOnceError, OSError) as error:
                fields = failed(error_text(error))
                if config.json:
                    print(out.document(fields), end="")
                raise
            out.result = self.report.as_dict(shown)
            log_report(self.report)
            if config.json:
                print(out.document(out.result), end="")
            else:
                show_report(self.report, report_file)

    def _verify(self) -> None:
        cache, config, checked = self._cache, self._config, list[CheckedShard]()
        refuse_no_cache(store := open_store(cache))  # first, so that a silent store is waited for only once
        chosen = list[int]()
        with suppress(CacheError, OSError):  # verify reports the problem
            spec = read_spec(store)
            chosen = [shard for shard in range(spec.num_shards) if not config.shards or shard in config.shards]
            self.report = replace(self.report, cache=str(store), shards=spec.num_shards)
        try:
            with ProgressBar(f"verify {self.report.level}", len(chosen), "shard") as bar:
                gc.freeze()  # otherwise the collector scans all loaded modules every few shards, a tenth of the time
                self.report = verify(
                    cache,
                    self.report.level,
                    subset=config.shards,
                    jobs=config.threads(cache),
                    progress=lambda each: self._show(each, checked, bar),
                )
        except OSError:  # a file that was not read is not damaged
            self.report = report_so_far(self.report, chosen, checked)
            raise
        except KeyboardInterrupt:  # SIGTERM too; verification only reads, so it can be left at any instant
            self.report = report_so_far(self.report, chosen, checked)
            raise Interrupted(
                "nothing was changed; run the same command again, or slices of it with --subset"
            ) from None

    def _show(self, each: CheckedShard, checked: list[CheckedShard], bar: ProgressBar) -> None:
        if each.task.level != self.report.level:
            return  # outside the subset
        checked.append(each)
        self._read += each.bytes
        speed = self._read / 1e9 / max(time.monotonic() - self._started, 1e-9)
        bar.update(note="" if self.report.level == "quick" else f"{speed:.2f} GB/s")


def report_so_far(report: Report, chosen: Sequence[int], checked: Sequence[CheckedShard]) -> Report:
    """Return the report of a stopped verification; it counts the shards before the first unread one."""
    by_shard = {each.task.shard: each for each in checked}
    read = [by_shard[shard] for shard in takewhile(by_shard.__contains__, chosen)]
    findings = sorted((finding for each in checked for finding in each.findings), key=in_reading_order)
    return replace(
        report,
        covered=len(read),
        samples=sum(each.content.cached for each in read if each.content),
        bytes=sum(each.bytes for each in read),
        findings=tuple(findings),
    )


def show_report(report: Report, report_file: str | None) -> None:
    shards = counted(report.shards, "shard")
    checked = f"{report.covered:,} of {shards}" if report.covered < report.shards else shards
    checked += f", {counted(report.samples, 'sample')}, {report.bytes:,} bytes"
    level = f"{report.level}, subset {report.subset}" if report.subset else report.level
    if report.subset and not report.covered:
        print(f"slice {report.subset} holds none of {shards}: all were checked at level quick")
        level = "quick"
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
