"""Files and folders on a local disk: names that survive a power cut, scratch files, and claims of a folder.

A claim is a lock that the kernel releases when its holder dies. Ranks of one build share it and never replace a file,
so they stay safe on file systems whose locks do not reach other machines.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

from cache_store.errors import CacheError, ConfigError, NotAFileError

SCRATCH_SUFFIX = ".partial"
SCRATCH_NAME = re.compile(rf"\.(.+)\.(\d+){re.escape(SCRATCH_SUFFIX)}")

CLAIM_FILE = ".claim"

Sync = Callable[[int], object]
"""Flushes what was written to a file descriptor to disk, as `os.fsync` does."""


def scratch_path(path: Path, attempt: int = 1) -> Path:
    return path.with_name(f".{path.name}.{attempt}{SCRATCH_SUFFIX}")


def unused_attempt() -> int:
    """Return a random number for scratch files that no other program uses."""
    return secrets.randbits(48)


def scratch_target(name: str) -> str | None:
    """Return the name that a scratch file was written for; None if `name` is not a scratch file's."""
    match = SCRATCH_NAME.fullmatch(name)
    return match and match[1]


def clear_scratch(path: Path) -> int:
    """Delete the scratch files of earlier attempts at `path`; return the number of the next attempt, from 1."""
    attempts = [0]
    for leftover in path.parent.glob(f".{path.name}.*{SCRATCH_SUFFIX}"):
        match = SCRATCH_NAME.fullmatch(leftover.name)
        if match and match[1] == path.name:
            attempts.append(int(match[2]))
            leftover.unlink()
    return max(attempts) + 1


@contextmanager
def name_in_errors(path: Path | str) -> Iterator[None]:
    """Add `path` to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def name_scratch_in_errors() -> AbstractContextManager[None]:
    """Add the folder of temporary files, and the variable that sets it, to an OSError that names no file."""
    return name_in_errors(f"{tempfile.gettempdir()} (TMPDIR names another folder)")


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
        with name_in_errors(folder):
            sync(descriptor)
    finally:
        os.close(descriptor)


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


def stream_sha256(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return stream_sha256(stream)


def refuse_foreign_names(root: Path, ours: Collection[str], option: str, kind: str) -> None:
    """Raise ConfigError, naming the option, if `root` cannot be a folder or holds names that are not in `ours`."""
    nearest = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"{option}: {nearest} is not a folder")
    if root.is_dir():
        names = {path.name for path in root.iterdir() if not path.name.endswith(SCRATCH_SUFFIX)}
        if foreign := sorted(names - {CLAIM_FILE, *ours}):
            raise ConfigError(f"{option}: {root} holds {foreign[0]!r} but no {kind}; name an empty or a new folder")


@contextmanager
def claim_folder(root: Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """Hold the folder for this process. If another process holds it, wait, or raise CacheError naming host and process.

    A shared claim excludes only exclusive ones; its file stays until the next exclusive claim ends. Folders that were
    created here are removed again if they stay empty.
    """
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        with locked_claim(root, wait, shared) as stream:
            with name_in_errors(root / CLAIM_FILE):
                stream.truncate(0)
                text = f"ranks of a build, the last to start as {holder}\n" if shared else f"{holder}\n"
                os.write(stream.fileno(), text.encode())  # at once: what a full disk leaves in a buffer fails unnamed
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
    """Return whether a process seems to hold the folder; it takes no lock, which could stop a process that starts.

    A process on another machine is assumed to run for as long as its claim file exists.
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
