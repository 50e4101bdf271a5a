"""A progress bar: redrawn in place on a terminal, one line per state in a log."""

import sys
from collections.abc import Mapping
from io import StringIO
from threading import RLock
from typing import Any

from tqdm import tqdm

from cache_store.log import is_plain, is_quiet, log_info

TERMINAL_REFRESH_S = 0.2

LOG_REFRESH_S = 30.0
"""Seconds between lines of progress if standard error is a file."""

DELAY_S = 0.5
"""Work that takes less shows no bar."""

LOGGED = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


NO_VALUES: Mapping[str, object] = {}


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """A bar on standard error; close it, or use it as a context."""

    monitor_interval = 0
    # tqdm's thread would draw more often bars that are updated rarely; this one looks at the clock each time.

    def __init__(
        self,
        desc: str,
        total: float | None,
        unit: str,
        *,
        done: int = 0,
        delay_s: float = DELAY_S,
        hidden: bool = False,
    ) -> None:
        self._is_drawn = is_plain() and sys.stderr.isatty()
        self._values: Mapping[str, object] = {}
        refresh_s = TERMINAL_REFRESH_S if self._is_drawn else LOG_REFRESH_S
        super().__init__(
            desc=desc,
            total=total,
            unit=unit,
            initial=done,
            delay=delay_s,
            disable=hidden or is_quiet(),
            file=None if self._is_drawn else StringIO(),
            bar_format=None if is_plain() else LOGGED,
            miniters=1,
            mininterval=refresh_s,
            maxinterval=refresh_s,
            smoothing=0.1,
        )

    def update(self, count: float | None = 1, note: str = "", values: Mapping[str, object] = NO_VALUES) -> None:
        """Count more of the work as done, with a note behind the bar, and values for a log."""
        self._values = values
        if note:
            self.set_postfix_str(note, refresh=False)
        super().update(count)

    def reach(self, done: float, note: str = "") -> None:
        self.update(done - self.n, note)

    def display(self, *drawn: Any, **options: Any) -> None:
        """Show the state; tqdm calls this."""
        if self._is_drawn:
            super().display(*drawn, **options)
        elif is_plain():
            print(str(self).strip(), file=sys.stderr)
        else:
            log_info(str(self).strip(), progress={**self._progress(), **self._values})

    def _progress(self) -> dict[str, object]:
        state = self.format_dict
        done, total, seconds = state["n"], state["total"], state["elapsed"]
        rate = state["rate"] or ((done - state["initial"]) / seconds if seconds else 0.0)
        return {
            "done": done,
            "total": total,
            "unit": state["unit"],
            "per_s": round(rate, 3),
            "seconds_left": round((total - done) / rate, 1) if rate and total else None,
        }

    def __del__(self) -> None:
        """Do nothing: tqdm would close the bar, and print a traceback if Ctrl-C came while it was made."""


# tqdm's own lock is also one between processes. Where they are spawned, a program that a signal ends leaves it behind,
# and Python's resource tracker warns of it.
ProgressBar.set_lock(RLock())
