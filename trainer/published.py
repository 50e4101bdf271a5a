"""Folders that appear and disappear whole: checkpoints and tokenised text."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.storage.files import SCRATCH_SUFFIX, make_folder, name_in_errors, scratch_path, sync_folder


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path`, durably, only if the block succeeds.

    `path` has one writer at a time, so a scratch folder that exists was left by a process that died.
    """
    make_folder(path.parent)
    clear_folders(path.parent, path.name)
    scratch = scratch_path(path)
    try:
        with naming_published(path, scratch):
            scratch.mkdir()
            yield scratch
            for file in scratch.iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            sync_folder(scratch)
            scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sync_folder(path.parent)


@contextmanager
def naming_published(path: Path, scratch: Path) -> Iterator[None]:
    """Name `path` in the system's error messages, not the scratch folder, which users do not know."""
    try:
        with name_in_errors(path):
            yield
    except OSError as error:
        error.filename = str(error.filename).replace(str(scratch), str(path))
        raise


def clear_folders(parent: Path, name: str) -> None:
    """Delete the scratch folders in `parent` of names that match the pattern `name`."""
    for leftover in parent.glob(f".{name}.*{SCRATCH_SUFFIX}"):
        shutil.rmtree(leftover)


def remove_folder(path: Path) -> None:
    """Rename the folder `path`, then delete it, so that no part of it is ever seen under its name."""
    scratch = path.rename(scratch_path(path))
    shutil.rmtree(scratch)
