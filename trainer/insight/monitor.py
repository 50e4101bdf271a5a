"""The command `monitor`: show a run in the terminal, reading its log again and again until the run ends."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import yaml
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cache_store.errors import ConfigError
from cache_store.storage.claim import is_claimed
from trainer.insight.health import WINDOW
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.folder import ALERTS, CONFIG_FILE, NONFINITE, TIME, LogLine, read_records

POLL_S = 2.0

BLOCKS = "▁▂▃▄▅▆▇█"

CURVE = 60
"""Characters of the loss curve."""

SHOWN_ALERTS = 5


@dataclass(frozen=True)
class Look:
    """A run's folder at one moment."""

    records: Sequence[LogLine]
    is_there: bool
    """Whether the folder exists; its disk may come and go."""
    is_running: bool
    is_done: bool

    @property
    def state(self) -> str:
        if not self.is_there:
            return "waiting for the folder, which has disappeared"
        if self.is_running:
            return "running"
        if self.is_done:
            return "done"
        return "diverged" if self.records and NONFINITE in self.records[-1] else "stopped; rerun to go on"


AWAY = Look((), is_there=False, is_running=False, is_done=False)


def look_at(folder: Path) -> Look:
    """Read the run's folder; a folder that is missing, or disappears while it is read, is no error."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            running, done = is_claimed(folder), (folder / PROJECTOR_FILE).is_file()
            return Look(read_records(folder), is_there=True, is_running=running, is_done=done)
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
    total = total_steps(folder)
    terminal = terminal or Terminal()
    with Live(page(folder, seen, total), console=terminal, auto_refresh=False) as live:
        while not once and (seen.is_running or not seen.is_there):
            sleep(POLL_S)
            found = look_at(folder)
            seen = found if found.is_there else replace(AWAY, records=seen.records)
            live.update(page(folder, seen, total), refresh=True)
    if not terminal.is_terminal:  # rich ends the last line only on a terminal
        terminal.print()
    return seen


def total_steps(folder: Path) -> int | None:
    """Read the run's number of steps from its config; None if the config does not give it."""
    config = yaml.safe_load((folder / CONFIG_FILE).read_bytes()) or {}
    steps = config.get("run", {}).get("max_steps")
    return steps if isinstance(steps, int) else None


def page(folder: Path, seen: Look, total: int | None) -> RenderableType:
    records = seen.records
    table = Table.grid(padding=(0, 2))
    for name, value in rows(seen, total):
        table.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [Text(str(folder), style="bold"), table]
    if total and records:
        parts.append(ProgressBar(total=total, completed=records[-1]["step"], width=CURVE))
    alerts = [(record["step"], alert) for record in records for alert in record.get(ALERTS, ())]
    parts += [Text(f"step {step:,}: {alert}", style="yellow") for step, alert in alerts[-SHOWN_ALERTS:]]
    return Group(*parts)


def rows(seen: Look, total: int | None) -> list[tuple[str, str]]:
    """List the figures of the newest steps, by name."""
    records = seen.records
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
    if "peak_memory_bytes" in last:
        found.append(("peak memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"))
    if total and rate > 0 and "position" in last and step:
        left_s = (total - step) * last["position"] / step / rate
        found.append(("left", f"{left_s / 3600:.1f} h" if left_s > 3600 else f"{left_s / 60:.0f} min"))
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
