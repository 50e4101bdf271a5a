"""A progress bar for terminals, which redraw it in place, and for logs, which keep every line."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

TERMINAL_REFRESH_S = 0.2

LOG_REFRESH_S = 30.0
"""Between lines of progress where standard error is a file."""


def progress_bar(**options: Any) -> "tqdm[Any]":
    """Make a tqdm of these options on standard error."""
    if sys.stderr.isatty():
        return tqdm(mininterval=TERMINAL_REFRESH_S, **options)
    log: Any = Log(sys.stderr)
    return tqdm(file=log, mininterval=LOG_REFRESH_S, maxinterval=LOG_REFRESH_S, **options)  # tqdm's maximum is 10 s


class Log:
    """Give each state of a bar a line of its own, beside messages, where tqdm would return to the line's beginning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.flush = stream, stream.flush
        self.encoding = stream.encoding  # by which tqdm chooses the bar's characters

    def write(self, text: str) -> None:
        if state := text.strip():
            self._stream.write(f"{state}\n")
