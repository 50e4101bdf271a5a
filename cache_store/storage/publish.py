"""Write files and folders whole or not at all: each is made under a scratch name, and gets its own once it is on disk.

Names survive a power cut. A scratch name is that of the file or folder with a number; what a dead program left under
one is deleted by the next writer.
"""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

SCRATCH_SUFFIX = ".partial"
SCRATCH_NAME = re.compile(rf"\.(.+)\.(\d+){re.escape(SCRATCH_SUFFIX)}")

Sync = Callable[[int], object]
"""Flushes what was written to a file descriptor to disk, as `flush` does."""


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path`, durably, only if the block succeeds.

    `path` has one writer at a time, so a scratch folder that exists was left by a process that died.
    """
    clear_folders(path.parent, path.name)
    with scratch_beside(path) as scratch:
        scratch.mkdir()
        yield scratch
        for made in (*scratch.iterdir(), scratch):
            sync_path(made)
        scratch.replace(path)
    sync_path(path.parent)


@contextmanager
def scratch_beside(path: Path, attempt: int = 1, sync: Sync = flush) -> Iterator[Path]:
    """Yield a scratch path in the folder of `path`, and delete what is left there; OSErrors name `path` instead."""
    make_folder(path.parent, sync)
    scratch = scratch_path(path, attempt)
    try:
        yield scratch
    except OSError as error:
        error.filename = str(path if error.filename is None else error.filename).replace(str(scratch), str(path))
        raise
    finally:
        with suppress(OSError):  # it was published, or the disk is gone, which another error reports
            shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink()


@contextmanager
def scratch_file() -> Iterator[Path]:
    """Create a scratch file in TMPDIR and yield its path; on Linux it has no name, so that a kill removes it, too."""
    with name_scratch_in_errors():
        descriptor, named = tempfile.mkstemp(SCRATCH_SUFFIX, "encode-once-")
    nameless = Path(f"/proc/self/fd/{descriptor}")
    try:
        if nameless.exists():
            Path(named).unlink()
            yield nameless
        else:
            yield Path(named)
    finally:
        os.close(descriptor)
        Path(named).unlink(missing_ok=True)


def scratch_path(path: Path, attempt: int = 1) -> Path:
    return path.with_name(f".{path.name}.{attempt}{SCRATCH_SUFFIX}")


def unused_attempt() -> int:
    return secrets.randbits(48)


def scratch_target(name: str) -> str | None:
    match = SCRATCH_NAME.fullmatch(name)
    return match and match[1]


def clear_scratch(path: Path) -> int:
    """Delete scratch files of earlier attempts; return the number of the next, from 1."""
    attempts = [0]
    for leftover in path.parent.glob(f".{path.name}.*{SCRATCH_SUFFIX}"):
        match = SCRATCH_NAME.fullmatch(leftover.name)
        if match and match[1] == path.name:
            attempts.append(int(match[2]))
            leftover.unlink()
    return max(attempts) + 1


def clear_folders(parent: Path, name: str) -> None:
    if leftovers := [*parent.glob(f".{name}.*{SCRATCH_SUFFIX}")]:
        sync_path(parent)  # or a power cut may give an emptied folder the name back that it had before
    for leftover in leftovers:
        shutil.rmtree(leftover)


def remove_folder(path: Path) -> None:
    path.rename(scratch_path(path))
    clear_folders(path.parent, path.name)


@contextmanager
def name_in_errors(path: Path | str) -> Iterator[None]:
    """Name `path` in an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def name_scratch_in_errors() -> AbstractContextManager[None]:
    return name_in_errors(f"{tempfile.gettempdir()} (TMPDIR names another folder)")


def make_folder(folder: Path, sync: Sync = flush) -> None:
    """Create a folder and its parents so that the names survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent, sync)
    folder.mkdir(exist_ok=True)
    sync_path(folder.parent, sync)


def sync_path(path: Path, sync: Sync = flush) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
            sync(descriptor)
    finally:
        os.close(descriptor)
