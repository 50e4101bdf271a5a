"""A JSON report for other programs: one head for all commands, and never left from an earlier run.

It is written first when the command starts, as that of a run which did not end, and again at the end, also where an
error ends it. So a report says `"sound": true` only if the run that it names has said so.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cache_store.errors import ConfigError
from cache_store.log import utc_time
from cache_store.program.output_file import is_written_through, refuse_output, write_output
from cache_store.storage.store import local_path
from cache_store.version import __version__

Fields = Mapping[str, object]

UNFINISHED = "did not end: it is running, or was killed"


class ReportFile:
    """The report of one run of `command`; a context within which `result` is set. Without a path it writes nothing."""

    def __init__(self, command: str, path: str | None, cache: str, failed: Callable[[str], Fields]) -> None:
        """`failed` gives the fields of a run that ended in an error.

        Raises ConfigError for a path that cannot be written, once the context is entered.
        """
        self.path = local_path("report", path) if path is not None else None
        self.result: Fields | None = None
        self._command, self._cache, self._failed = command, cache, failed
        self._time, self._started = utc_time(), time.monotonic()

    def __enter__(self) -> Self:
        if self.path:
            refuse_output("report", self.path, self._cache)
            if not is_written_through(self.path):
                self._write(self.path, self._failed(UNFINISHED))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path:
            self._write(self.path, self.result if self.result is not None else self._failed(in_words(error)))

    def document(self, fields: Fields) -> str:
        """The report as JSON."""
        seconds = round(time.monotonic() - self._started, 3)
        head = {"command": self._command, "version": __version__, "time": self._time, "seconds": seconds}
        return msgspec.json.format(msgspec.json.encode(head | dict(fields)), indent=1).decode() + "\n"

    def _write(self, path: Path, fields: Fields) -> None:
        try:
            write_output(path, self.document(fields).encode())
        except OSError as error:
            raise ConfigError(f"report: {path} cannot be written: {error.strerror}") from None


def in_words(error: BaseException | None) -> str:
    """What ended a run, on one line or with the table of a refusal."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'no file named'}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped by a signal"
    return str(error) or type(error).__name__
