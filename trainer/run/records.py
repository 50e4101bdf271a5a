"""The records of a run's steps, as its log holds them: one JSON object a line."""

import json
from pathlib import Path
from typing import Any

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
