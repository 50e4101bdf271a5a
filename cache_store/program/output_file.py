"""Files that a program writes for its user, such as reports and pages: never into a cache."""

import errno
import os
import sys
from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.storage.files import naming, scratch_path
from cache_store.storage.local import write_file
from cache_store.storage.store import is_url

STDOUT = 1
"""Its file descriptor."""


def refuse_output(option: str, path: Path, cache: Path | str) -> None:
    """Raise ConfigError, before any work is done, where `path` cannot be written or lies in the cache."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: the folder of {path} does not exist")
    refuse_inside(option, path, cache)
    try:
        try_writing(path)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def refuse_inside(option: str, path: Path, cache: Path | str) -> None:
    """Raise ConfigError where `path`, a file or a folder, lies in the cache or is the cache."""
    if not is_url(cache) and real_path(path).is_relative_to(real_path(Path(cache).expanduser())):
        raise ConfigError(f"{option}: {path} lies in the cache {cache}; name another place")


def try_writing(path: Path) -> None:
    """Raise OSError where `write_output` would fail at once; change nothing."""
    if path.exists() and not os.access(path, os.W_OK):  # not opened: a pipe would wait for its reader
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not is_written_through(path):
        scratch_path(path).open("wb").close()
        scratch_path(path).unlink()
    elif not path.exists():  # a link to where nothing is yet
        real_path(path).open("xb").close()
        real_path(path).unlink()


def write_output(path: Path, data: bytes) -> None:
    """Write the file whole or not at all; a pipe, a link or /dev/stdout is written through instead of replaced."""
    if is_stdout(path):  # which may be a file, and what was printed stands in it already
        sys.stdout.flush()
        with naming(path), open(STDOUT, "wb", closefd=False) as stream:
            stream.write(data)
    elif is_written_through(path):
        with naming(path):
            path.write_bytes(data)
    else:
        write_file(path, data)


def is_written_through(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def is_stdout(path: Path) -> bool:
    is_open = sys.stdout is not None  # which a parent may have closed
    return is_open and path.exists() and os.path.samestat(path.stat(), os.fstat(STDOUT))


def real_path(path: Path) -> Path:
    """Follow links as Path.resolve does, which raises for a link to itself."""
    return Path(os.path.realpath(path))
