"""Full disks, made by the kernel: no call is replaced."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of that size at `folder`."""
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if mount is None or subprocess.run([mount, *options], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system; the other tests of full disks stand for it")
    try:
        yield folder
    finally:
        # Lazily: the frames of a failed test hold files open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_room(disk: Path) -> None:
    """Enlarge a mounted disk."""
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
