"""Write files for the user, such as reports and pages, but never into a cache."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cache_store.errors import ConfigError
from cache_store.log import utc_time
from cache_store.storage.local import write_file
from cache_store.storage.publish import scratch_path
from cache_store.storage.store import is_url, local_path
from cache_store.version import __version__

Fields = Mapping[str, object]

UNFINISHED = "did not end: it is running, or was killed"


def refuse_output(option: str, path: Path, cache: Path | str) -> None:
    """Raise ConfigError, before any work is done, if `path` cannot be written or lies in the cache."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device or a pipe would be replaced
        raise ConfigError(f"{option}: {path} is a link, a folder or a device; name a file")
    refuse_inside(option, path, cache)
    try:
        scratch_path(path).open("wb").close()
        scratch_path(path).unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def refuse_inside(option: str, path: Path, cache: Path | str, kind: str = "cache") -> None:
    """Raise ConfigError if `path`, a file or a folder, lies in the cache, or another folder, or is that."""
    if not is_url(cache) and real_path(path).is_relative_to(real_path(Path(cache).expanduser())):
        raise ConfigError(f"{option}: {path} lies in the {kind} {cache}; name another place")


def write_result(option: str, path: Path, data: bytes) -> None:
    """Write the file; ConfigError if it cannot be written, whose exit code tells that from damage."""
    try:
        write_file(path, data)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def real_path(path: Path) -> Path:
    """Follow links as Path.resolve does, which raises for a link to itself."""
    return Path(os.path.realpath(path))


class ReportFile:
    """The JSON report of one run of `command`, for other programs; a context within which `result` is set.

    It is written when the command starts, as the report of a run that did not end, and again at the end, even after an
    error. So no report of an earlier run stays, and `"sound": true` is always the result of the run that it names.
    Without a path, nothing is written.
    """

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
            self._write(self.path, self._failed(UNFINISHED))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path:
            self._write(self.path, self.result if self.result is not None else self._failed(error_text(error)))

    def document(self, fields: Fields) -> str:
        seconds = round(time.monotonic() - self._started, 3)
        head = {"command": self._command, "version": __version__, "time": self._time, "seconds": seconds}
        return msgspec.json.format(msgspec.json.encode(head | dict(fields)), indent=1).decode() + "\n"

    def _write(self, path: Path, fields: Fields) -> None:
        write_result("report", path, self.document(fields).encode())


def error_text(error: BaseException | None) -> str:
    """Describe the error that ended a run; a refusal keeps its table."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'no file named'}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped by a signal"
    return str(error) or type(error).__name__
