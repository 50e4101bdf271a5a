"""The output folder of a run, refused if it holds anything else: its resolved config, and its log.

The log has one JSON object a line.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from cache_store.errors import ConfigError
from cache_store.program.output_file import real_path
from cache_store.storage.local import LocalStore, write_file
from trainer.config import TrainConfig, TrainRunConfig
from trainer.run.checkpoint import CheckpointFolder

CONFIG_FILE, METRICS_FILE, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"

CAPTIONS = "captions"
"""Key of a line's captions, a list of records."""

ALERTS = "alerts"
"""Key of the problems found in the run at a step, a list of sentences."""

TIME = "time"
"""Key of the time when a step was done: UTC, ISO 8601."""

GPU_USE = "gpu_use"
"""Key of the share of time in which rank 0's GPU was busy, about once a second."""

NONFINITE = "nonfinite"
"""Key of the values that JSON has no number for, by name; the values themselves are null."""

LogLine = Mapping[str, Any]
"""A line of the log, parsed."""


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the log's records, one per step; empty without a log. Lines cut short by a kill are skipped."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [record for record in map(as_step, lines) if record is not None]


def as_step(line: bytes) -> dict[str, Any] | None:
    """Parse a line, without nulls; None if it is not a step's record."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda _: None)
    except ValueError:  # not UTF-8, or not JSON
        return None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        return None
    return {name: value for name, value in record.items() if value is not None}


def checkpoints_of(run: TrainRunConfig) -> CheckpointFolder:
    return CheckpointFolder(run.folder / CHECKPOINTS, run.keep_last)


def refuse_foreign_output(config: TrainConfig) -> None:
    """Raise ConfigError if run.output holds anything but a run, or is also data.text_dir."""
    folder, text_dir = real_path(config.run.folder), real_path(Path(config.text_dir or "/").expanduser())
    if text_dir == folder:
        raise ConfigError(f"data.text_dir: {config.text_dir} is run.output; name a folder inside it, or another folder")
    if not has_run(config.run):  # its folder of text may be there before its config
        own = text_dir.relative_to(folder).parts[:1] if text_dir.is_relative_to(folder) else ()
        LocalStore(config.run.folder).refuse_foreign_names(own, "run.output", "run")


def has_run(run: TrainRunConfig) -> bool:
    return is_resolved_config(run.folder / CONFIG_FILE) or bool(checkpoints_of(run).steps())


def is_resolved_config(path: Path) -> bool:
    """Return whether the file has the sections of a TrainConfig: many programs write a config.yaml."""
    sections = re.findall(rb"^(\w+):", path.read_bytes() if path.is_file() else b"", re.MULTILINE)
    return [name.decode() for name in sections] == [field.name for field in fields(TrainConfig)]


def write_config(config: TrainConfig) -> None:
    text = yaml.safe_dump(asdict(config), sort_keys=False)
    write_file(config.run.folder / CONFIG_FILE, text.encode())


def write_changed(path: Path, data: bytes) -> None:
    if not (path.is_file() and path.read_bytes() == data):
        write_file(path, data)
