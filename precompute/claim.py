"""One build at a time in a cache: a lock that the kernel drops when its holder dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.errors import CacheError
from cache_store.publish import make_folder

CLAIM_FILE = ".claim"


@contextmanager
def claim(root: Path) -> Iterator[None]:
    """Hold the cache for this process; CacheError naming host and process of whoever holds it already."""
    make_folder(root)
    with (root / CLAIM_FILE).open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise CacheError(f"{root} is being built by {holder}; wait for it or stop it") from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        stream.flush()
        yield
        stream.truncate(0)
