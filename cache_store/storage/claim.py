"""Claim a folder of this machine for one writer, or for the ranks of one build.

A claim is a lock that the kernel releases when its holder dies. Ranks of one build share it and never replace a file,
so they stay safe on file systems whose locks do not reach other machines. A file system without locks, such as Lustre
mounted without `flock`, gets a warning in place of a lock.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cache_store.errors import CacheError
from cache_store.log import log_warning
from cache_store.storage.publish import make_folder, name_in_errors

CLAIM_FILE = ".claim"

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks."""

HOLDER = re.compile(r"^(process (\d+) on (.*))$", re.MULTILINE)
"""A line of the claim file; each rank adds one."""


@contextmanager
def claim_folder(root: Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """Hold the folder for this process. If another process holds it, wait, or raise CacheError naming host and process.

    A shared claim excludes only exclusive ones; its file stays until the next exclusive claim ends. Folders that were
    created here are removed again if they stay empty.
    """
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        with locked_claim(root, wait, shared) as stream:
            with name_in_errors(root / CLAIM_FILE):
                if not shared:
                    stream.truncate(0)
                # At once: what a full disk leaves in a buffer fails unnamed.
                os.write(stream.fileno(), f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            try:
                yield
            finally:
                if not shared:
                    (root / CLAIM_FILE).unlink(missing_ok=True)  # still locked, so it is our own file
    finally:
        with suppress(OSError):  # stop at the first folder that is not empty
            for folder in new:
                folder.rmdir()


def is_claimed(root: Path) -> bool:
    """Return whether a process seems to hold the folder; it takes no lock, which could stop a process that starts."""
    try:
        return bool(holders((root / CLAIM_FILE).read_text()))
    except FileNotFoundError:
        return False


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


@contextmanager
def locked_claim(root: Path, wait: bool, shared: bool) -> Iterator[IO[str]]:
    """Lock the claim file; try again if its last holder has deleted it in the meantime."""
    while True:
        make_folder(root)
        with (root / CLAIM_FILE).open("a+") as stream:
            try:
                with name_in_errors(root / CLAIM_FILE):
                    fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                stream.seek(0)
                named = ", ".join(holders(stream.read())[-3:]) or "another process"
                raise CacheError(f"{root} is being written by {named}; wait for it or stop it") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                log_warning(
                    f"{root} is on a file system without locks ({error.strerror}), so nothing keeps a second writer "
                    "out: run one at a time, or mount it with locks"
                )
            is_ours = False
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(os.fstat(stream.fileno()), (root / CLAIM_FILE).stat())
            if is_ours:
                yield stream
                return


def holders(claim: str) -> list[str]:
    here = os.uname().nodename
    return [name for name, process, host in HOLDER.findall(claim) if host != here or is_running(int(process))]
