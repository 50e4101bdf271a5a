"""A progress bar: redrawn in place on a terminal, one line per state in a log."""

import sys
from io import StringIO
from typing import Any, TextIO

from tqdm import tqdm

from cache_store.log import is_plain, log_info

TERMINAL_REFRESH_S = 0.2

LOGGED = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

LOG_REFRESH_S = 30.0
"""Seconds between lines of progress if standard error is a file."""


def progress_bar(**options: Any) -> "tqdm[Any]":
    """Make a tqdm bar on standard error; `options` are tqdm's."""
    if not is_plain():
        return LoggedBar(mininterval=LOG_REFRESH_S, maxinterval=LOG_REFRESH_S, bar_format=LOGGED, **options)
    if sys.stderr.isatty():
        return tqdm(mininterval=TERMINAL_REFRESH_S, **options)
    lines: Any = Lines(sys.stderr)
    return tqdm(file=lines, mininterval=LOG_REFRESH_S, maxinterval=LOG_REFRESH_S, **options)  # tqdm's maximum is 10 s


class LoggedBar(tqdm):  # type: ignore[type-arg]
    """A bar whose states are records of the log."""

    def __init__(self, **options: Any) -> None:
        super().__init__(file=StringIO(), **options)

    def display(self, *_: Any, **__: Any) -> None:
        """Log the state; tqdm calls this instead of drawing the bar."""
        state = self.format_dict
        values = {"done": state["n"], "total": state["total"], "unit": state["unit"]}
        log_info(self.format_meter(**state).strip(), progress=values)


class Lines:
    """A stream that writes each state of a bar on its own line; tqdm alone would use carriage returns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.flush = stream, stream.flush
        self.encoding = stream.encoding  # tqdm chooses the bar's characters by it

    def write(self, text: str) -> None:
        if state := text.strip():
            self._stream.write(f"{state}\n")
