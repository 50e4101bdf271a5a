"""Verifications in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats/), for the
textfile collector of its node exporter.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from cache_store.errors import ConfigError
from cache_store.storage.local import write_file
from cache_store.verify.findings import Kind, Report

HELP = {
    "sound": "1 if the last verification ended and found nothing, else 0.",
    "findings": "Findings of the last verification, by kind.",
    "shards": "Shards of the cache.",
    "checked_shards": "Shards that the last verification read at its level.",
    "verification_time_seconds": "Start of the last verification, in seconds since 1970.",
    "verified_time_seconds": "Start of the last verification that read all and found nothing.",
}

VERIFIED = re.compile(r'^encode_once_cache_verified_time_seconds\{cache="(.*)"\} ([0-9.]+)$', re.MULTILINE)


def write_metrics(path: Path, reports: Mapping[str, tuple[Report, float]]) -> None:
    """Write the file from the report of each cache and its start; a cache keeps its last time of `verified`."""
    lines: dict[str, list[str]] = {name: [] for name in HELP}
    try:
        verified = dict(VERIFIED.findall(path.read_text(errors="replace"))) if path.is_file() else {}
        for cache, (report, began) in reports.items():
            name, kinds = escaped(cache), Counter(finding.kind for finding in report.findings)
            if report.sound and report.level != "quick" and report.covered == report.shards:
                verified[name] = f"{began:.3f}"
            label = f'cache="{name}"'
            lines["sound"].append(f'{{{label},level="{report.level}"}} {report.sound:d}')
            lines["findings"] += [f'{{{label},kind="{kind}"}} {kinds[kind]}' for kind in get_args(Kind)]
            lines["shards"].append(f"{{{label}}} {report.shards}")
            lines["checked_shards"].append(f"{{{label}}} {report.covered}")
            lines["verification_time_seconds"].append(f"{{{label}}} {began:.3f}")
            if name in verified:
                lines["verified_time_seconds"].append(f"{{{label}}} {verified[name]}")
        text = (
            f"# HELP encode_once_cache_{name} {HELP[name]}\n# TYPE encode_once_cache_{name} gauge\n"
            + "".join(f"encode_once_cache_{name}{line}\n" for line in each)
            for name, each in lines.items()
        )
        write_file(path, "".join(text).encode())
    except OSError as error:  # exit code 2 tells it from damage
        raise ConfigError(f"metrics: {path} cannot be written: {error.strerror}") from None


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
