"""Reading what is to be a file: a folder in its place is damage, and a pipe would be waited on for ever."""

import errno
import stat
from pathlib import Path

from cache_store.errors import NotAFileError

NOT_A_FILE = "is no file: a folder, a pipe or a link to itself lies in its place"


def refuse_irregular(path: Path) -> None:
    """NotAFileError where something else than a file lies; a path at which nothing lies passes."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        regular = error.errno != errno.ELOOP  # a link to itself; whoever opens it names any other error
    if not regular:
        raise NotAFileError(f"{path} {NOT_A_FILE}")


def read_regular(path: Path) -> bytes:
    refuse_irregular(path)
    return path.read_bytes()
