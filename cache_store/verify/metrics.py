"""The result of verifications in the text form of Prometheus, for its node exporter's textfile collector.

Its specification: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from cache_store.program.output_file import write_result
from cache_store.verify.findings import Kind, Report


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One verification: its report, and when and for how long it ran."""

    report: Report
    began: float
    """Seconds since 1970."""
    seconds: float
    verified: float | None
    """When the last verification of every byte that found nothing began, in seconds since 1970; None if unknown."""


HELP = {
    "sound": "1 if the last verification ended and found nothing, else 0.",
    "findings": "Findings of the last verification, by kind.",
    "shards": "Shards of the cache.",
    "checked_shards": "Shards that the last verification read at its level.",
    "checked_bytes": "Bytes of these shards.",
    "verification_seconds": "Seconds that the last verification took.",
    "verification_time_seconds": "Start of the last verification, in seconds since 1970.",
    "verified_time_seconds": "Start of the last verification that read all and found nothing.",
}


VERIFIED = re.compile(r'^encode_once_cache_verified_time_seconds\{cache="(.*)"\} ([0-9.]+)$', re.MULTILINE)


def write_metrics(path: Path, measured: Sequence[Measured]) -> None:
    """Write the file, in which a cache keeps its last time of `verified` if this run does not tell one."""
    before = dict(VERIFIED.findall(path.read_text(errors="replace"))) if path.is_file() else {}
    known = [
        replace(each, verified=float(before[name]))
        if each.verified is None and (name := escaped(each.report.cache)) in before
        else each
        for each in measured
    ]
    write_result("metrics", path, metrics_text(known).encode())


def metrics_text(measured: Sequence[Measured]) -> str:
    """Return all metrics of these caches."""
    lines: dict[str, list[str]] = {name: [] for name in HELP}
    for each in measured:
        for name, labels, value in values_of(each):
            shown = ",".join(f'{key}="{escaped(text)}"' for key, text in {"cache": each.report.cache, **labels}.items())
            lines[name].append(f"encode_once_cache_{name}{{{shown}}} {value!r}\n")
    return "".join(
        f"# HELP encode_once_cache_{name} {HELP[name]}\n# TYPE encode_once_cache_{name} gauge\n{''.join(each)}"
        for name, each in lines.items()
        if each
    )


def values_of(measured: Measured) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each metric of a cache."""
    report = measured.report
    yield "sound", {"level": report.level}, int(report.sound)
    kinds = Counter(finding.kind for finding in report.findings)
    yield from (("findings", {"kind": kind}, kinds[kind]) for kind in get_args(Kind))
    yield "shards", {}, report.shards
    yield "checked_shards", {}, report.covered
    yield "checked_bytes", {}, report.bytes
    yield "verification_seconds", {}, round(measured.seconds, 3)
    yield "verification_time_seconds", {}, round(measured.began, 3)
    if measured.verified is not None:
        yield "verified_time_seconds", {}, round(measured.verified, 3)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
