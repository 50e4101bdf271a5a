"""Whole or absent, for folders: how checkpoints and tokenised text come into being, and go."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.publish import make_folder, scratch_path, sync_folder


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Give a scratch folder that becomes `path`, durably, only if the block succeeds; one writer at a time."""
    make_folder(path.parent)
    scratch = scratch_path(path)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for file in scratch.iterdir():
            sync_file(file)
        sync_folder(scratch)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Delete `path` such that it is never seen in part."""
    scratch = scratch_path(path)
    shutil.rmtree(scratch, ignore_errors=True)
    path.rename(scratch)
    shutil.rmtree(scratch)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
