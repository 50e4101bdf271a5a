"""Write files for the user, such as reports and pages, but never into a cache."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cache_store.errors import ConfigError
from cache_store.log import utc_time
from cache_store.storage.local import write_file
from cache_store.storage.publish import scratch_path
from cache_store.storage.store import is_url, local_path
from cache_store.version import __version__

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


def refuse_inside(option: str, path: Path, cache: Path | str) -> None:
    """Raise ConfigError if `path`, a file or a folder, lies in the cache or is it."""
    if not is_url(cache) and real_path(path).is_relative_to(real_path(Path(cache).expanduser())):
        raise ConfigError(f"{option}: {path} lies in the cache {cache}; name another place")


def real_path(path: Path) -> Path:
    # Path.resolve raises for a link to itself.
    return Path(os.path.realpath(path))


@contextmanager
def json_report(
    command: str, path: str | None, cache: str, failed: Callable[[str], Mapping[str, object]], *, prints: bool = False
) -> Iterator[dict[str, object]]:
    """Yield a dict for the fields of a run's report, which is written to `path`, if given, and printed if it `prints`.

    The file is written first as the report of a run that did not end, and again at the end, even after an error, with
    the fields that `failed` returns: so no report of an earlier run stays. ConfigError if it cannot be written.
    """
    file, started = None if path is None else local_path("report", path), time.monotonic()
    head, fields = {"command": command, "version": __version__, "time": utc_time()}, dict[str, object]()

    def document() -> bytes:
        seconds = round(time.monotonic() - started, 3)
        return msgspec.json.format(msgspec.json.encode(head | {"seconds": seconds} | fields), indent=1) + b"\n"

    def write() -> None:
        if file:
            try:
                write_file(file, document())
            except OSError as error:  # exit code 2 tells it from damage
                raise ConfigError(f"report: {file} cannot be written: {error.strerror}") from None

    if file:
        refuse_output("report", file, cache)
    fields.update(failed(UNFINISHED))
    write()
    fields.clear()
    try:
        yield fields
    except BaseException as error:
        fields.update(failed(error_text(error)))
        raise
    finally:
        write()
        if prints:
            print(document().decode(), end="")


def error_text(error: BaseException) -> str:
    """Describe the error that ended a run; a refusal keeps its table."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'no file named'}"
    return "stopped by a signal" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
