"""The log of a run: one JSON line a step, with the same values in its trackers and on the terminal."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_store.log import utc_time
from cache_store.messages import printable
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import write_file
from cache_store.storage.publish import name_in_errors
from trainer.config import TrainConfig
from trainer.insight.trackers import open_trackers
from trainer.run.figures import Caption, Metrics, Validation, answer_lines
from trainer.run.folder import ALERTS, CAPTIONS, METRICS_FILE, NONFINITE, TIME, as_step

LogStep = Callable[[int, Metrics, Validation, Sequence[str]], None]
"""Logs a step: its number, its figures, its validation, the problems that began at it."""


@contextmanager
def open_log(config: TrainConfig, completed: int, total: int) -> Iterator[LogStep]:
    """Continue a run's log after `completed` of `total` steps.

    A step without figures is one whose validation a stopped run owed; its line gets the validation.
    """
    folder = config.run.folder
    drop_later_steps(folder / METRICS_FILE, completed)
    bar = ProgressBar("train", total, "step", done=completed, delay_s=0.0)
    with bar, open_trackers(config, completed) as track:

        def log_step(step: int, metrics: Metrics, validation: Validation, alerts: Sequence[str]) -> None:
            if metrics:
                append_step(folder, {**metrics, **validation.metrics}, validation.captions, alerts)
                note = f"loss {metrics['loss']:.3f}, {metrics['samples_per_s']:.1f} samples/s"
                bar.reach(step, note)
            else:
                amend_last_step(folder, validation.metrics, validation.captions)
            track(step, {**metrics, **validation.metrics}, validation.captions, alerts)
            lines = [f"step {step:,}: {alert}" for alert in alerts] + [validation.summary] * bool(validation.summary)
            for each in validation.captions:
                shown = {name: text for name, text in each.parts.items() if name != "prompt"}
                lines += answer_lines(f"row {each.row}, {printable(each.id)}", shown)
            if lines:
                bar.write("\n".join(lines))

        yield log_step


def append_step(folder: Path, metrics: Metrics, captions: Sequence[Caption] = (), alerts: Sequence[str] = ()) -> None:
    path, noted = folder / METRICS_FILE, {ALERTS: [*alerts]} if alerts else {}
    with name_in_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(as_json({**metrics, TIME: utc_time(), **noted}, captions) + "\n")


def amend_last_step(folder: Path, metrics: Metrics, captions: Sequence[Caption]) -> None:
    path = folder / METRICS_FILE
    *before, last = path.read_bytes().splitlines(keepends=True)
    amended = as_json(json.loads(last) | metrics, captions)
    write_file(path, b"".join([*before, amended.encode() + b"\n"]))


def as_json(record: Mapping[str, Any], captions: Sequence[Caption]) -> str:
    """Return one line of the log. JSON has no NaN: such values are null, and named under NONFINITE."""
    captioned = {CAPTIONS: [caption.record for caption in captions]} if captions else {}
    broken = {
        name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    }
    named = {**dict.fromkeys(broken), NONFINITE: broken} if broken else {}
    return json.dumps({**record, **named, **captioned}, allow_nan=False)


def drop_later_steps(path: Path, completed_steps: int) -> None:
    """Drop lines of steps after the checkpoint, which run again, and lines cut short by a kill or a full disk."""
    if not path.exists():
        return
    lines = [(line, as_step(line)) for line in path.read_bytes().split(b"\n")]
    kept = [line for line, record in lines if record is not None and record["step"] <= completed_steps]
    write_file(path, b"".join(line + b"\n" for line in kept))
