"""The command `monitor`: show a run in the terminal, reading its log again and again until the run ends."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from cache_store.errors import ConfigError
from cache_store.messages import shown_time
from cache_store.storage.claim import is_claimed
from trainer.config import TrainRunConfig
from trainer.insight.health import PLATEAU_STEPS, WINDOW, problems, values
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.folder import ALERTS, CONFIG_FILE, GPU_USE, NONFINITE, TIME, LogLine, read_records

POLL_S, CURVE, SHOWN_ALERTS, BLOCKS = 2.0, 60, 5, "▁▂▃▄▅▆▇█"
"""Seconds between two looks, characters of the loss curve, alerts shown."""


@dataclass(frozen=True)
class Look:
    """A run's folder at one moment."""

    records: Sequence[LogLine]
    state: str
    is_running: bool
    total: int | None
    """Steps of the run; None if it is not known yet."""


def monitor(
    folder: Path, terminal: Terminal | None = None, sleep: Callable[[float], None] = time.sleep, *, once: bool = False
) -> Look:
    """Show the run until it ends, or `once`; return the last look. ConfigError for a folder that holds no run."""
    seen, terminal = look_at(folder), terminal or Terminal()
    shown = Live(page(folder, seen), console=terminal, auto_refresh=False) if terminal.is_terminal else None
    with shown or nullcontext():
        while seen.is_running and not once:
            sleep(POLL_S)
            seen = look_at(folder)
            if shown:
                shown.update(page(folder, seen), refresh=True)
    if not shown:  # a file or a pipe gets the end alone, in lines of any length
        terminal.print(page(folder, seen), soft_wrap=True)
    return seen


def look_at(folder: Path) -> Look:
    try:
        is_running, is_done = is_claimed(folder), (folder / PROJECTOR_FILE).is_file()
        config, records = yaml.safe_load((folder / CONFIG_FILE).read_bytes()) or {}, read_records(folder)
    except OSError as error:
        raise ConfigError(f"{folder} holds no run: {CONFIG_FILE}: {error.strerror}") from None
    state = "done" if is_done else "stopped; rerun to go on"
    if is_running:
        state = "running"
    elif records and NONFINITE in records[-1] and not is_done:
        state = "diverged"
    return Look(records, state, is_running, total_steps(config, records))


def total_steps(config: Mapping[str, Any], records: Sequence[LogLine]) -> int | None:
    run, last = config.get("run", {}), records[-1] if records else {}
    if run.get("max_steps") is None and not last.get("epoch"):
        return None
    length = TrainRunConfig(output="any", epochs=run.get("epochs", 1.0), max_steps=run.get("max_steps"))
    samples = round(last["position"] / last["epoch"]) if last.get("epoch") else 0
    return length.total_steps(samples, config.get("data", {}).get("batch_size", 1))


def page(folder: Path, seen: Look) -> Text:
    lines = [Text(str(folder), style="bold")]
    lines += [Text.assemble((f"{name:<15}", "dim"), value) for name, value in rows(seen)]
    alerts = [f"step {record['step']:,}: {alert}" for record in seen.records for alert in record.get(ALERTS, ())]
    return Text("\n").join(lines + [Text(alert, style="yellow") for alert in alerts[-SHOWN_ALERTS:]])


def rows(seen: Look) -> Iterator[tuple[str, str]]:
    """Yield the figures of the newest steps, by name; all but the curve are medians of the last WINDOW."""
    records, total = seen.records, seen.total
    yield "state", seen.state
    if not records:
        return
    last, step, rate = records[-1], records[-1]["step"], middle(records, "samples_per_s")
    yield "step", f"{step:,}{f' of {total:,}' if total else ''}, at {last.get(TIME, 'an unknown time')}"
    yield "loss", f"{middle(records, 'loss'):.4g}  {curve([each['loss'] for each in records if 'loss' in each])}"
    if validated := [record for record in records if "val_loss" in record]:
        yield "validation", f"{validated[-1]['val_loss']:.4g} at step {validated[-1]['step']:,}"
    yield "gradient norm", f"{middle(records, 'grad_norm'):.4g}"
    yield "samples/s", f"{rate:.4g}, tokens/s {middle(records, 'tokens_per_s'):.4g}"
    yield "waiting", f"{middle(records, 'data_wait_share'):.1%}"
    if not math.isnan(used := middle(records, GPU_USE)):
        yield "GPU use", f"{used:.0%}"
    if "peak_memory_bytes" in last:
        yield "peak memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"
    yield "health", ", ".join(name for name, _ in problems(records[-PLATEAU_STEPS:])) or "no problem at this step"
    if total and step < total and rate > 0 and "position" in last:
        yield "left", shown_time((total - step) * last["position"] / step / rate)


def middle(records: Sequence[LogLine], name: str) -> float:
    return median(values(records, name)[-WINDOW:] or [math.nan])


def curve(losses: Sequence[float]) -> str:
    size = max(1, math.ceil(len(losses) / CURVE))
    points = [median(losses[start : start + size]) for start in range(0, len(losses), size)]
    low, span = min(points, default=0.0), max(points, default=0.0) - min(points, default=0.0)
    return "".join(BLOCKS[min(7, int(8 * (point - low) / (span or 1.0)))] for point in points)
