"""`cache-store`: look into a cache and verify it, on any machine, without torch."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from cache_store.command_line import program_parser, run_program, to_config
from cache_store.errors import ConfigError
from cache_store.findings import Finding, Level, Report
from cache_store.gallery.command import gallery_parser, show_gallery
from cache_store.gallery.config import GalleryConfig
from cache_store.info import describe
from cache_store.metadata import read_spec
from cache_store.publish import write_file
from cache_store.verify import verify
from cache_store.verify_shard import UNCOMMITTED

SHOWN_FINDINGS = 50

EXAMPLES = """\
  cache-store info data/cc3m/cache
  cache-store verify data/cc3m/cache                 records, sizes, coverage, seal: seconds
  cache-store verify data/cc3m/cache --level full    every byte
  cache-store gallery data/cc3m/cache -o cc3m.html   look at it
"""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check a cache; exits 1 if anything is damaged."""

    level: Level = "quick"
    """quick: records, sizes, coverage, seal. full: every file's sha256, every sample's crc32c and values, all ids."""
    report: str | None = None
    """Also write the findings to this JSON file."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `cache-store`; returns the exit code."""
    return run_program("cache-store", run, argv)


def run(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(list(argv))
    options = arguments[arguments.command]
    return COMMANDS[arguments.command](options)


def build_parser() -> ArgumentParser:
    parser = program_parser("cache-store", "Look into a cache of latents and verify it; needs no torch.", EXAMPLES)
    commands = parser.add_subcommands(dest="command", title="commands", metavar="COMMAND")
    info = ArgumentParser(exit_on_error=False, description="Show what a cache holds and how it was made.")
    check = ArgumentParser(exit_on_error=False, description=VerifyConfig.__doc__)
    for command in (info, check):
        command.add_argument("cache", type=str, help="the cache's folder")
    check.add_class_arguments(VerifyConfig, None)
    commands.add_subcommand("info", info, help="the spec, counts, sizes and throughput, in a table")
    commands.add_subcommand("verify", check, help="is every byte right? exit 1 if not")
    gallery = gallery_parser(GalleryConfig)
    commands.add_subcommand("gallery", gallery, help="rows of the cache on an HTML page: random, unusual, rejected")
    return parser


def info_command(options: Any) -> int:
    lines = describe(Path(options.cache))
    width = max(len(field) for field, _ in lines)
    for field, value in lines:
        print(f"{field:<{width}}  {value}")
    return 0


def verify_command(options: Any) -> int:
    if options.report and not Path(options.report).parent.is_dir():
        raise ConfigError(f"--report: the folder of {options.report} does not exist")
    spec = read_spec(Path(options.cache))
    total = spec.num_shards * len(spec.arrays)
    with tqdm(total=total, desc=f"verify {options.level}", unit="shard", delay=0.5) as bar:
        report = verify(options.cache, options.level, lambda shard: bar.update())
    if options.report:
        write_file(Path(options.report), json.dumps(report.as_dict(), indent=1).encode())
    show_report(report)
    return 1 if report.findings else 0


def gallery_command(options: Any) -> int:
    from cache_store.gallery.gallery import make_gallery  # pulls in matplotlib

    config = to_config(GalleryConfig, gallery_parser(GalleryConfig), options)
    show_gallery(make_gallery(Path(options.cache).expanduser(), config))
    return 0


def show_report(report: Report) -> None:
    checked = f"{report.shards:,} shards, {report.samples:,} samples, {report.bytes:,} bytes"
    if not report.findings:
        print(f"sound ({report.level}): {checked}\ncache identity {report.identity}")
        return
    uncommitted = [finding for finding in report.findings if finding.problem == UNCOMMITTED]
    others = [finding for finding in report.findings if finding.problem != UNCOMMITTED]
    show_findings(others)
    if uncommitted:
        print(
            f"unfinished: {len(uncommitted):,} of {report.shards:,} shards are not committed; "
            "rerun the `precompute build` that made the cache"
        )
    print(f"not sound ({report.level}): {len(report.findings):,} findings in {checked}")
    if others and not uncommitted:
        print(f"next: write the findings down with --report FILE, then precompute repair {report.cache} --report FILE")


def show_findings(findings: list[Finding]) -> None:
    table = Table("shard", "row", "file", "problem", box=None)
    for finding in findings[:SHOWN_FINDINGS]:
        place = ["" if value is None else str(value) for value in (finding.shard, finding.row)]
        table.add_row(*place, finding.file, finding.problem)
    # A pipe has no width; wide enough that nothing is broken there.
    Console(highlight=False, width=None if sys.stdout.isatty() else 300).print(table)
    if (more := len(findings) - SHOWN_FINDINGS) > 0:
        print(f"and {more:,} more; --report FILE writes them all")


COMMANDS = {"info": info_command, "verify": verify_command, "gallery": gallery_command}
