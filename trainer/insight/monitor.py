"""The command `monitor`: show a run in the terminal, reading its log again and again until the run ends."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from cache_store.errors import ConfigError
from cache_store.storage.claim import is_claimed
from trainer.config import TrainRunConfig
from trainer.insight.health import WINDOW
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.folder import ALERTS, CONFIG_FILE, GPU_USE, NONFINITE, TIME, LogLine, read_records

POLL_S = 2.0

QUIET_S, QUIET_STEPS = 10.0, 5
"""A run is quiet if no step came for so many seconds, and for so many times the usual step."""

BLOCKS = "▁▂▃▄▅▆▇█"

CURVE = 60
"""Characters of the loss curve and of the bar."""

SHOWN_ALERTS = 5


@dataclass(frozen=True)
class Look:
    """A run's folder at one moment."""

    records: Sequence[LogLine]
    is_there: bool
    """Whether the folder exists; its disk may come and go."""
    is_running: bool
    is_done: bool
    total: int | None = None
    """Steps of the run; None if it is not known yet."""
    quiet_s: float = 0.0
    """Seconds since the newest step, by this machine's clock, if steps usually take much less."""

    @property
    def state(self) -> str:
        if not self.is_there:
            return "waiting for the folder, which has disappeared"
        if self.is_running:
            return f"running, but no step for {duration(self.quiet_s)}" if self.quiet_s else "running"
        if self.is_done:
            return "done"
        return "diverged" if self.records and NONFINITE in self.records[-1] else "stopped; rerun to go on"


AWAY = Look((), is_there=False, is_running=False, is_done=False)


def look_at(folder: Path) -> Look:
    """Read the run's folder; a folder that is missing, or disappears while it is read, is no error."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            running, done = is_claimed(folder), (folder / PROJECTOR_FILE).is_file()
            config, records = yaml.safe_load((folder / CONFIG_FILE).read_bytes()) or {}, read_records(folder)
            return Look(records, True, running, done, total_steps(config, records), quiet_s(records, datetime.now(UTC)))
    except OSError:
        pass
    return AWAY


def monitor(
    folder: Path, terminal: Terminal | None = None, sleep: Callable[[float], None] = time.sleep, *, once: bool = False
) -> Look:
    """Show the run until it ends, or `once`; return the last look. ConfigError for a folder that holds no run."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} holds no run: no {CONFIG_FILE}")
    seen = look_at(folder)
    if not seen.is_there:
        raise ConfigError(f"{folder} is not a run's folder")
    terminal = terminal or Terminal()
    shown = Live(page(folder, seen), console=terminal, auto_refresh=False) if terminal.is_terminal else None
    with shown or nullcontext():
        while not once and (seen.is_running or not seen.is_there):
            sleep(POLL_S)
            found = look_at(folder)
            seen = found if found.is_there else replace(AWAY, records=seen.records, total=seen.total)
            if shown:
                shown.update(page(folder, seen), refresh=True)
    if not shown:  # a file or a pipe gets the end alone, in lines of any length
        terminal.print(page(folder, seen), soft_wrap=True)
    return seen


def total_steps(config: dict[str, Any], records: Sequence[LogLine]) -> int | None:
    """Return the run's number of steps; None if it follows from the number of samples, and no step is done yet."""
    run, last = config.get("run", {}), records[-1] if records else {}
    if run.get("max_steps") is None and not last.get("epoch"):
        return None
    length = TrainRunConfig(output="any", epochs=run.get("epochs", 1.0), max_steps=run.get("max_steps"))
    samples = round(last["position"] / last["epoch"]) if last.get("epoch") else 0
    return length.total_steps(samples, config.get("data", {}).get("batch_size", 1))


def quiet_s(records: Sequence[LogLine], now: datetime) -> float:
    """Return the seconds since the newest step, or 0 if they are no more than usual."""
    times = [datetime.fromisoformat(record[TIME]) for record in records[-WINDOW:] if TIME in record]
    if not times:
        return 0.0
    usual = median([(after - before).total_seconds() for before, after in pairwise(times)] or [0.0])
    passed = (now - times[-1]).total_seconds()
    return passed if passed > max(QUIET_S, QUIET_STEPS * usual) else 0.0


def duration(seconds: float) -> str:
    """Write a duration in one unit: `20 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.0f} min"


def page(folder: Path, seen: Look) -> Text:
    return Text("\n").join(page_lines(folder, seen))


def page_lines(folder: Path, seen: Look) -> Iterator[Text]:
    yield Text(str(folder), style="bold")
    for name, value in rows(seen):
        yield Text.assemble((f"{name:<15}", "dim"), value)
    if seen.total and seen.records:
        done = min(CURVE, CURVE * seen.records[-1]["step"] // seen.total)
        yield Text("━" * done + "─" * (CURVE - done))
    alerts = [(record["step"], alert) for record in seen.records for alert in record.get(ALERTS, ())]
    for step, alert in alerts[-SHOWN_ALERTS:]:
        yield Text(f"step {step:,}: {alert}", style="yellow")


def rows(seen: Look) -> list[tuple[str, str]]:
    """List the figures of the newest steps, by name."""
    records, total = seen.records, seen.total
    found = [("state", seen.state)]
    if not records:
        return found
    last, recent = records[-1], records[-WINDOW:]
    step, rate = last["step"], middle(recent, "samples_per_s")
    found.append(("step", f"{step:,}{f' of {total:,}' if total else ''}, at {last.get(TIME, 'an unknown time')}"))
    found.append(("loss", f"{middle(recent, 'loss'):.4g}  {curve([r['loss'] for r in records if 'loss' in r])}"))
    if validated := [record for record in records if "val_loss" in record]:
        found.append(("validation", f"{validated[-1]['val_loss']:.4g} at step {validated[-1]['step']:,}"))
    found.append(("gradient norm", f"{middle(recent, 'grad_norm'):.4g}"))
    found.append(("samples/s", f"{rate:.4g}, tokens/s {middle(recent, 'tokens_per_s'):.4g}"))
    found.append(("waiting", f"{middle(recent, 'data_wait_share'):.1%}"))
    if measured := [record for record in records if GPU_USE in record]:
        found.append(("GPU use", f"{middle(measured[-WINDOW:], GPU_USE):.0%}"))
    if "peak_memory_bytes" in last:
        found.append(("peak memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"))
    if total and step < total and rate > 0 and "position" in last:
        left_s = (total - step) * last["position"] / step / rate
        found.append(("left", duration(left_s)))
    return found


def middle(records: Sequence[LogLine], key: str) -> float:
    values = [record[key] for record in records if key in record]
    return median(values) if values else math.nan


def curve(values: Sequence[float]) -> str:
    """Draw values as blocks, each the median of a few."""
    if not values:
        return ""
    size = math.ceil(len(values) / CURVE)
    points = [median(values[start : start + size]) for start in range(0, len(values), size)]
    low, span = min(points), max(points) - min(points)
    return "".join(BLOCKS[min(7, int(8 * (point - low) / span))] if span else BLOCKS[0] for point in points)
