"""One build at a time in a cache: a lock that the kernel drops when its holder dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cache_store.errors import CacheError
from cache_store.publish import make_folder

CLAIM_FILE = ".claim"


@contextmanager
def claim(root: Path) -> Iterator[None]:
    """Hold the cache for this process; CacheError naming host and process of whoever holds it already.

    Folders that were made for a build that then left nothing in them go again.
    """
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    make_folder(root)
    try:
        with locked(root) as stream:
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            stream.flush()
            try:
                yield
            finally:
                (root / CLAIM_FILE).unlink(missing_ok=True)  # while it is locked: nobody else's can be meant
    finally:
        with contextlib.suppress(OSError):  # the first folder that holds something ends it
            for folder in new:
                folder.rmdir()


@contextmanager
def locked(root: Path) -> Iterator[IO[str]]:
    """The claim file, locked: the one that lies in the folder, not one that its last holder has just deleted."""
    while True:
        with (root / CLAIM_FILE).open("a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                raise CacheError(f"{root} is being built by {holder}; wait for it or stop it") from None
            if is_same_file(stream, root / CLAIM_FILE):
                yield stream
                return


def is_same_file(stream: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False
