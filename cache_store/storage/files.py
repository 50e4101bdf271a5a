"""Files and folders of this machine; only regular files are opened."""

import errno
import hashlib
import mmap
import os
import stat
from io import BufferedReader
from pathlib import Path

from cache_store.errors import NotAFileError


def refuse_irregular(path: Path | str) -> os.stat_result:
    """Return the status of a regular file; NotAFileError otherwise, since opening a pipe could block for ever."""
    try:
        status = os.stat(path)  # noqa: PTH116 (making a Path would double the time)
    except OSError as error:
        if error.errno != errno.ELOOP and not os.path.islink(path):  # noqa: PTH114
            raise
    else:
        if stat.S_ISREG(status.st_mode):
            return status
    raise NotAFileError(f"{path} is not a file: a folder, a pipe or a broken link is in its place")


def map_file(path: Path) -> memoryview:
    if not refuse_irregular(path).st_size:
        return memoryview(b"")  # mmap refuses an empty file
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def stream_sha256(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return stream_sha256(stream)
