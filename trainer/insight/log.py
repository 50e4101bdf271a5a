"""The log of a run: one JSON line a step, with the same values in its trackers, and the progress bar."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cache_store.log import utc_time
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import write_file
from cache_store.storage.publish import name_in_errors
from trainer.config import TrainConfig
from trainer.insight.trackers import Tracker, open_trackers
from trainer.run.folder import ALERTS, CAPTIONS, METRICS_FILE, NONFINITE, TIME, as_step
from trainer.run.observers import Caption, Metrics, Observer, StepDone, caption_lines


class Console(Observer):
    """Shows progress, alerts, validations and captions on the terminal."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._bar: ProgressBar | None = None

    def begin(self, completed: int) -> None:
        self._bar = ProgressBar("train", self._total, "step", done=completed, delay_s=0.0)

    def after_step(self, step: StepDone) -> None:
        assert self._bar is not None, "a run begins before its first step"
        if step.metrics and not step.diverged:
            loss, rate = step.metrics["loss"], step.metrics["samples_per_s"]
            self._bar.update(note=f"loss {loss:.3f}, {rate:.1f} samples/s")
        lines = [f"step {step.number:,}: {alert}" for alert in step.alerts]
        if step.validation.summary:
            lines.append(step.validation.summary)
        lines += [line for caption in step.validation.captions for line in caption_lines(caption)]
        if lines:
            self._bar.write("\n".join(lines))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class StepLog(Observer):
    """Logs each step of a run."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._log: MetricsLog | None = None

    def begin(self, completed: int) -> None:
        self._log = MetricsLog(self._config.run.folder, completed, open_trackers(self._config, completed))

    def after_step(self, step: StepDone) -> None:
        assert self._log is not None, "a run begins before its first step"
        validation = step.validation
        if step.metrics:
            self._log.write({**step.metrics, **validation.metrics}, validation.captions, step.alerts)
        else:
            self._log.amend({"step": step.number, **validation.metrics}, validation.captions)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class MetricsLog:
    """The log `metrics.jsonl` in `folder`, continued after `completed_steps`; trackers get the same values."""

    def __init__(self, folder: Path, completed_steps: int, trackers: Sequence[Tracker] = ()) -> None:
        self.path, self._trackers = folder / METRICS_FILE, trackers
        drop_later_steps(self.path, completed_steps)
        self._lines = self.path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics, captions: Sequence[Caption] = (), alerts: Sequence[str] = ()) -> None:
        noted = {ALERTS: [*alerts]} if alerts else {}
        with name_in_errors(self.path):
            self._lines.write(as_json({**metrics, TIME: utc_time(), **noted}, captions) + "\n")
            self._lines.flush()
        self._track(metrics, captions, alerts)

    def _track(self, metrics: Metrics, captions: Sequence[Caption], alerts: Sequence[str] = ()) -> None:
        step, values = int(metrics["step"]), {name: value for name, value in metrics.items() if name != "step"}
        for tracker in self._trackers:
            tracker.add_scalars(step, values)
            if captions:
                tracker.add_captions(step, captions)
            if alerts:
                tracker.add_alerts(step, alerts)

    def amend(self, metrics: Metrics, captions: Sequence[Caption] = ()) -> None:
        """Add values to the last line."""
        *before, last = self.path.read_bytes().splitlines(keepends=True)
        amended = as_json(json.loads(last) | metrics, captions)
        write_file(self.path, b"".join([*before, amended.encode() + b"\n"]))
        self._lines.close()
        self._lines = self.path.open("a", encoding="utf-8")
        self._track(metrics, captions)

    def close(self) -> None:
        with name_in_errors(self.path):
            self._lines.close()
        for tracker in self._trackers:
            tracker.close()


def as_json(record: Mapping[str, Any], captions: Sequence[Caption]) -> str:
    """Return one line of the log, which is valid JSON even if the run has diverged."""
    captioned = {CAPTIONS: [caption.record for caption in captions]} if captions else {}
    return json.dumps({**without_nonfinite(record), **captioned}, allow_nan=False)


def without_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by null, and name them under NONFINITE."""
    broken = {name: value for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not broken:
        return dict(record)
    return {**record, **dict.fromkeys(broken), NONFINITE: {name: str(value) for name, value in broken.items()}}


def drop_later_steps(path: Path, completed_steps: int) -> None:
    """Drop lines of steps after the checkpoint, which run again, and lines cut short by a kill or a full disk."""
    if not path.exists():
        return
    lines = [(line, as_step(line)) for line in path.read_bytes().split(b"\n")]
    kept = [line for line, record in lines if record is not None and record["step"] <= completed_steps]
    write_file(path, b"".join(line + b"\n" for line in kept))
