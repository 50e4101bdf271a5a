"""The output folder of a run, which is refused where it holds anything else, and the records in its log.

The resolved config lies in it; the log has one JSON object a line.
"""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from cache_store.errors import ConfigError
from cache_store.program.output_file import real_path
from cache_store.storage.files import refuse_foreign_names
from cache_store.storage.local import write_file
from trainer.config import TrainConfig, TrainRunConfig
from trainer.run.checkpoint import CheckpointFolder
from trainer.run.observers import Metrics

METRICS_FILE = "metrics.jsonl"

CAPTIONS = "captions"
"""Key of a line's captions, a list of records."""

ALERTS = "alerts"
"""Key of what was said of the run's health at a step, a list of sentences."""

TIME = "time"
"""Key of the time at which a step was done: UTC, ISO 8601."""

NONFINITE = "nonfinite"
"""Key of the values that JSON has no number for: their names and `nan`, `inf` or `-inf`. They themselves are null."""


def read_metrics(folder: Path, step: int) -> Metrics:
    """Return the log's values of a step; none where it has no line for it."""
    return next((record for record in reversed(read_records(folder)) if record["step"] == step), {})


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the log's lines, one a step; none without a log. Lines that a kill left broken are passed over."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [record for record in map(as_step, lines) if record is not None]


def as_step(line: bytes) -> dict[str, Any] | None:
    """Parse a line, without values that are not finite; None where it is no record of a step."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda _: None)
    except ValueError:  # no UTF-8, or no JSON
        return None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        return None
    return {name: value for name, value in record.items() if value is not None}


CONFIG_FILE, CHECKPOINTS = "config.yaml", "checkpoints"


def checkpoints_of(run: TrainRunConfig) -> CheckpointFolder:
    return CheckpointFolder(run.folder / CHECKPOINTS, run.keep_last)


def refuse_foreign_output(config: TrainConfig) -> None:
    """Raise ConfigError where run.output holds anything but a run, or is also data.text_dir."""
    if config.text_dir and real_path(Path(config.text_dir).expanduser()) == real_path(config.run.folder):
        raise ConfigError(f"data.text_dir: {config.text_dir} is run.output; name a folder in it, or another")
    if not has_run(config.run):
        refuse_foreign_names(config.run.folder, names_before_the_config(config), "run.output", "run")


def names_before_the_config(config: TrainConfig) -> tuple[str, ...]:
    """List what a run may leave that stopped before it wrote its config: its text, if that is kept in the output."""
    folder, text_dir = real_path(config.run.folder), real_path(Path(config.text_dir or "/").expanduser())
    return text_dir.relative_to(folder).parts[:1] if text_dir.is_relative_to(folder) else ()


def has_run(run: TrainRunConfig) -> bool:
    """Tell whether the folder holds a run: its config, which is written first, or checkpoints."""
    return is_resolved_config(run.folder / CONFIG_FILE) or bool(checkpoints_of(run).steps())


def is_resolved_config(path: Path) -> bool:
    """Tell whether the file has exactly the sections of a TrainConfig: many programs write a config.yaml.

    Older versions had no `caches`.
    """
    sections = re.findall(rb"^(\w+):", path.read_bytes() if path.is_file() else b"", re.MULTILINE)
    found, known = [name.decode() for name in sections], [field.name for field in fields(TrainConfig)]
    return found in (known, [name for name in known if name != "caches"])


def write_config(config: TrainConfig) -> None:
    text = yaml.safe_dump(asdict(config), sort_keys=False)
    write_file(config.run.folder / CONFIG_FILE, text.encode())


def write_changed(path: Path, data: bytes) -> None:
    """Write a file of the output, whole, unless it holds these bytes already."""
    if not (path.is_file() and path.read_bytes() == data):
        write_file(path, data)
