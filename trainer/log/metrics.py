"""The metrics of a run: one JSON line a step, and the same values in its trackers."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cache_store.log import utc_time
from cache_store.storage.files import naming
from cache_store.storage.local import write_file
from trainer.log.captions import Caption
from trainer.log.trackers import Tracker

METRICS_FILE = "metrics.jsonl"

CAPTIONS = "captions"
"""Key of a line's captions, a list of records; all other values are numbers."""

TIME = "time"
"""Key of the time at which a step was done: UTC, ISO 8601."""

NONFINITE = "nonfinite"
"""Key of the values that JSON has no number for: their names and `nan`, `inf` or `-inf`. They themselves are null."""

Metrics = dict[str, float | int]


class MetricsLog:
    """`metrics.jsonl` under `folder`, continued after `completed_steps`, and the run's trackers, told the same."""

    def __init__(self, folder: Path, completed_steps: int, trackers: Sequence[Tracker] = ()) -> None:
        self.path, self._trackers = folder / METRICS_FILE, trackers
        drop_later_steps(self.path, completed_steps)
        self._lines = self.path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics, captions: Sequence[Caption] = ()) -> None:
        with naming(self.path):
            self._lines.write(as_json({**metrics, TIME: utc_time()}, captions) + "\n")
            self._lines.flush()
        self._track(metrics, captions)

    def _track(self, metrics: Metrics, captions: Sequence[Caption]) -> None:
        step, values = int(metrics["step"]), {name: value for name, value in metrics.items() if name != "step"}
        for tracker in self._trackers:
            tracker.add_scalars(step, values)
            if captions:
                tracker.add_captions(step, captions)

    def amend(self, metrics: Metrics, captions: Sequence[Caption] = ()) -> None:
        """Add values to the last line."""
        *before, last = self.path.read_bytes().splitlines(keepends=True)
        amended = as_json(json.loads(last) | metrics, captions)
        write_file(self.path, b"".join([*before, amended.encode() + b"\n"]))
        self._lines.close()
        self._lines = self.path.open("a", encoding="utf-8")
        self._track(metrics, captions)

    def close(self) -> None:
        with naming(self.path):
            self._lines.close()
        for tracker in self._trackers:
            tracker.close()


def as_json(record: Mapping[str, Any], captions: Sequence[Caption]) -> str:
    """Lay out one line: valid JSON whatever a diverged run has computed."""
    said = {CAPTIONS: [caption.record for caption in captions]} if captions else {}
    return json.dumps({**nullified(record), **said}, allow_nan=False)


def nullified(record: Mapping[str, Any]) -> dict[str, Any]:
    """Put null for numbers that are not finite, and say under NONFINITE what they are."""
    broken = {name: value for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not broken:
        return dict(record)
    return {**record, **dict.fromkeys(broken), NONFINITE: {name: str(value) for name, value in broken.items()}}


def read_metrics(folder: Path, step: int) -> Metrics:
    """Return the log's values of a step; none where it has no line for it."""
    return next((record for record in reversed(read_records(folder)) if record["step"] == step), {})


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the log's lines, one a step; none without a log. Lines that a kill left broken are passed over."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [record for record in map(as_step, lines) if record is not None]


def drop_later_steps(path: Path, completed_steps: int) -> None:
    """Drop lines of steps after the checkpoint, which run again, and lines that a kill or a full disk left broken."""
    if not path.exists():
        return
    lines = [(line, as_step(line)) for line in path.read_bytes().split(b"\n")]
    kept = [line for line, record in lines if record is not None and record["step"] <= completed_steps]
    write_file(path, b"".join(line + b"\n" for line in kept))


def as_step(line: bytes) -> dict[str, Any] | None:
    """Parse a line, without values that are not finite; None where it is no record of a step."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda _: None)
    except ValueError:  # no UTF-8, or no JSON
        return None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        return None
    return {name: value for name, value in record.items() if value is not None}
