"""Files on a local disk: names that survive a power cut, scratch files, and paths that are not regular files."""

import errno
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader
from pathlib import Path

from cache_store.errors import ChangedError, NotAFileError, TooLargeError

SCRATCH_SUFFIX = ".partial"
SCRATCH_NAME = re.compile(rf"\.(.+)\.(\d+){re.escape(SCRATCH_SUFFIX)}")

NOT_A_FILE = "is no file: a folder, a pipe or a link to nothing lies in its place"

MAX_READ_BYTES = 128 * 2**20
"""Default bound of a file that is read whole; a seal of a million shards takes 80 MB."""

Sync = Callable[[int], object]
"""Flushes what was written to a file descriptor to disk, as `os.fsync` does."""


def scratch_path(path: Path, attempt: int = 1) -> Path:
    return path.with_name(f".{path.name}.{attempt}{SCRATCH_SUFFIX}")


def unused_attempt() -> int:
    """Return a random number for scratch files that no other program uses."""
    return secrets.randbits(48)


def scratch_of(name: str) -> str | None:
    """Return the name that a scratch file was written for; None if `name` is not a scratch file's."""
    match = SCRATCH_NAME.fullmatch(name)
    return match and match[1]


def clear_scratch(path: Path) -> int:
    """Delete what earlier attempts at `path` left behind; returns the number of the next attempt, from 1."""
    attempts = [0]
    for leftover in path.parent.glob(f".{path.name}.*{SCRATCH_SUFFIX}"):
        match = SCRATCH_NAME.fullmatch(leftover.name)
        if match and match[1] == path.name:
            attempts.append(int(match[2]))
            leftover.unlink()
    return max(attempts) + 1


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add `path` to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def naming_scratch() -> AbstractContextManager[None]:
    """Name the folder of temporary files in those, and what chooses it."""
    return naming(f"{tempfile.gettempdir()} (TMPDIR names another folder)")


def make_folder(folder: Path, sync: Sync = os.fsync) -> None:
    """Create `folder` and its parents so that the names survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent, sync)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent, sync)


def sync_folder(folder: Path, sync: Sync = os.fsync) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            sync(descriptor)
    finally:
        os.close(descriptor)


def refuse_irregular(path: Path | str) -> os.stat_result:
    """Return the status of a regular file; NotAFileError otherwise, since opening a pipe could block for ever."""
    try:
        status = os.stat(path)  # noqa: PTH116 (a Path takes as long as all the rest)
    except OSError as error:
        if error.errno != errno.ELOOP and not os.path.islink(path):  # noqa: PTH114
            raise
    else:
        if stat.S_ISREG(status.st_mode):
            return status
    raise NotAFileError(f"{path} {NOT_A_FILE}")


def too_large(where: Path | str, size: int, at_most: int) -> TooLargeError:
    """Return the error for a file that is larger than its kind can be, and is not read."""
    error = TooLargeError(f"{where} is {size:,} bytes, at most {at_most:,} can be")
    error.size = size
    return error


def changed(where: Path | str) -> ChangedError:
    """Return the error for a file that was written to while it was read."""
    return ChangedError(f"{where} was changed while it was read; restore it and run the same command again")


def missing(where: str) -> FileNotFoundError:
    """Return the error for a file that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)


def cut_short(where: str) -> OSError:
    """Return the error for a file that seems to end before the bytes that were asked for."""
    return OSError(errno.ENODATA, "answers are cut short, also when asked again", where)


def stream_sha256(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return stream_sha256(stream)
