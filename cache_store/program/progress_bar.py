"""A progress bar for terminals, which redraw it in place, and for logs, which keep every line."""

import sys
from typing import Any

from tqdm import tqdm

TERMINAL_REFRESH_S = 0.2

LOG_REFRESH_S = 30.0
"""Between lines of progress where standard error is a file."""


def progress_bar(**options: Any) -> "tqdm[Any]":
    """Make a tqdm of these options on standard error."""
    if sys.stderr.isatty():
        return tqdm(mininterval=TERMINAL_REFRESH_S, **options)
    return tqdm(mininterval=LOG_REFRESH_S, maxinterval=LOG_REFRESH_S, **options)  # tqdm's own maximum is 10 s
