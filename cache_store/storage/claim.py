"""Taking a folder for a cache, or a run: never one that holds something else, and one writer at a time.

The claim is a lock that the kernel drops when its holder dies. Ranks of one build share it: no file is theirs alone, so
that they write none in place of another. Where locks end at a machine, it only spares them work.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cache_store.errors import CacheError, ConfigError
from cache_store.storage.files import SCRATCH_SUFFIX, make_folder, naming

CLAIM_FILE = ".claim"


def refuse_foreign_names(root: Path, ours: Collection[str], option: str, kind: str) -> None:
    """ConfigError, naming the option, where `root` can be no folder or holds, without a `kind` of ours, other names."""
    nearest = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"{option}: {nearest} is not a folder")
    if root.is_dir():
        names = {path.name for path in root.iterdir() if not path.name.endswith(SCRATCH_SUFFIX)}
        if foreign := sorted(names - {CLAIM_FILE, *ours}):
            raise ConfigError(f"{option}: {root} holds {foreign[0]!r} but no {kind}; name an empty or a new folder")


@contextmanager
def claim(root: Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """Hold the folder for this process; CacheError naming host and process of whoever holds it already, or wait.

    A shared claim keeps out only those that are not shared; its file stays until the next of those ends. Folders that
    were made for a build that then left nothing in them go again.
    """
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        with locked(root, wait, shared) as stream:
            with naming(root / CLAIM_FILE):
                stream.truncate(0)
                stream.write(f"ranks of a build, the last to start as {holder}\n" if shared else f"{holder}\n")
                stream.flush()
            try:
                yield
            finally:
                if not shared:
                    (root / CLAIM_FILE).unlink(missing_ok=True)  # while it is locked: nobody else's can be meant
    finally:
        with contextlib.suppress(OSError):  # the first folder that holds something ends it
            for folder in new:
                folder.rmdir()


def is_claimed(root: Path) -> bool:
    """Tell whether a process seems to hold the folder, without a lock, which would be in the way of one that starts.

    A process of another machine is taken to live for as long as its claim lies there.
    """
    try:
        holder = re.fullmatch(r"process (\d+) on (.*)\n", (root / CLAIM_FILE).read_text())
    except FileNotFoundError:
        return False
    if holder is None or holder[2] != os.uname().nodename:
        return True
    try:
        os.kill(int(holder[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def locked(root: Path, wait: bool, shared: bool) -> Iterator[IO[str]]:
    """The claim file, locked: the one that lies in the folder, not one that its last holder has just deleted."""
    while True:
        make_folder(root)
        with (root / CLAIM_FILE).open("a+") as stream:
            try:
                fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                raise CacheError(f"{root} is being written by {holder}; wait for it or stop it") from None
            if is_same_file(stream, root / CLAIM_FILE):
                yield stream
                return


def is_same_file(stream: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False
