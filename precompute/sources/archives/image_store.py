"""Where a source's images lie: a folder, or a zip or tar that is read in place and never unpacked.

One file at most is in memory for each thread that reads, of MAX_FILE_BYTES at most.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

from cache_store.errors import SourceError
from cache_store.format.names import PLAN_FILE, SPEC_FILE
from cache_store.storage.claim import CLAIM_FILE
from precompute.images.not_images import COMPRESSED, by_magic
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MAX_FILE_BYTES, MISSING, is_mac_metadata, refuse_large
from precompute.sources.archives.image_tar import ImageTar, is_tar
from precompute.sources.archives.image_zip import ImageZip
from precompute.sources.archives.listing import Listing, is_utf8
from precompute.sources.archives.names import Names
from precompute.sources.archives.shared_index import open_indexed
from precompute.sources.files.file import LocalFile, SourceFile

HEAD_BYTES = 512
"""Enough to tell what a file is."""

MAX_NAME_BYTES, MAX_PATH = 255, 4_000
"""Linux's own bounds on a name and, nearly, a path."""

CACHE_FILES = frozenset({SPEC_FILE, PLAN_FILE})
"""A folder that holds both is a cache."""

MISSING_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}
)
"""Errors that mean a missing file, ENXIO that it is a socket. Others (a failing disk or mount) are not the sample's
fault: they stop the build, which resumes when it is run again.
"""


MORE_BYTES = 2**20
"""Read at a time of a file that is larger than it says."""


class Images(Protocol):
    def fingerprint(self, name: str, /) -> str:
        """Return what changes when an image file changes, without reading it; MISSING where there is none."""

    def read(self, name: str, /) -> bytes:
        """Read the file's bytes; Rejected where that is not possible. Called from several threads."""


class ImageStore(Images, Protocol):
    def listing(self) -> Listing:
        """List every file's name, and what else is there; SourceError where a folder cannot be listed."""

    def version(self) -> str | None:
        """Return what changes when anything is written there; None where each image would have to be looked at."""


class ImageFolder:
    """Images in a folder; names are relative to it and cannot leave it.

    Links are the owner's choice and are followed, also out of the folder; linked folders are not listed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def listing(self) -> Listing:
        """List all files except those of caches, which may lie in the very folder of their images."""
        others = Listing(names=(), not_utf8=[], linked_folders=[], caches=[])
        return others._replace(names=Names(self._walked(others)))

    def _walked(self, others: Listing) -> Iterator[str]:
        """Names, while all that is none is put into `others`."""

        def refuse(error: OSError) -> None:
            raise SourceError(f"{error.filename} cannot be listed: {error.strerror}")

        def within(name: str) -> str:
            return Path(folder, name).relative_to(self._root).as_posix()

        for folder, subfolders, files in os.walk(self._root, onerror=refuse):
            if CACHE_FILES.issubset(files):
                others.caches.append(within(""))
                subfolders.clear()
                continue
            subfolders.sort()
            others.linked_folders.extend(within(name) for name in subfolders if Path(folder, name).is_symlink())
            for path in (within(name) for name in sorted(files) if name != CLAIM_FILE):
                if not is_mac_metadata(path):
                    if is_utf8(path):
                        yield path
                    else:
                        others.not_utf8.append(path)

    def version(self) -> None:
        """Only each file tells whether it is as it was."""

    def fingerprint(self, name: str) -> str:
        try:
            status = os.stat(self._path(name))  # noqa: PTH116 (a Path takes as long as all the rest)
        except Rejected:
            return MISSING
        except OSError as error:
            if error.errno not in MISSING_ERRORS:
                raise
            return MISSING
        return f"{status.st_size}:{status.st_mtime_ns}"

    def read(self, name: str) -> bytes:
        path = self._path(name)
        try:
            with opened(path) as descriptor:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):  # reading a pipe or device could hang
                    raise Rejected(MISSING, f"{name} is not a file")
                refuse_large(name, status.st_size)
                data = os.read(descriptor, status.st_size + 1)
                while len(data) != status.st_size and len(data) <= MAX_FILE_BYTES:  # it grew, or it lies, as in /proc
                    if not (more := os.read(descriptor, MORE_BYTES)):
                        break
                    data += more
        except OSError as error:
            if error.errno not in MISSING_ERRORS:
                raise
            raise Rejected(MISSING, f"{name}: {error.strerror}") from None
        refuse_large(name, len(data))
        return data

    def _path(self, name: str) -> str:
        if is_unsafe(name):
            raise Rejected(MISSING, f"{name!r} is not a name inside the image folder")
        return f"{self._root}/{name}"


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file for `os.read`, in half the time that Python's own `open` takes; a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_unsafe(name: str) -> bool:
    if is_plainly_safe(name):
        return False
    parts = PurePosixPath(name).parts
    try:
        too_long = len(name) > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts)
    except UnicodeEncodeError:
        return True  # no file has such a name
    return not parts or name.startswith("/") or ".." in parts or "\0" in name or too_long


def is_plainly_safe(name: str) -> bool:
    """Whether a name is like nearly all, told in a µs; others are looked at part by part."""
    is_short = name.isascii() and len(name) <= MAX_NAME_BYTES
    return is_short and name[:1] not in ("", ".", "/") and ".." not in name and "\0" not in name


def open_image_store(path: Path) -> ImageStore:
    """Open a folder, a zip or a tar; a file's content decides, not its name."""
    if path.is_dir():
        return ImageFolder(path)
    if not path.is_file():
        raise SourceError(f"images: {path} is neither a folder nor a file; expected a folder, a zip or a tar of images")
    return open_archive(LocalFile(path))


def open_archive(file: SourceFile) -> ImageTar | ImageZip:
    """By its content, not its name."""
    head = file.part(0, HEAD_BYTES)
    if compressed := by_magic(head, COMPRESSED):
        raise SourceError(f"images: {file} {compressed}, so it cannot be read in place; unpack it")
    return open_indexed(ImageTar if is_tar(file.name, head) else ImageZip, file)


def folder_below(folder: Path, name: str) -> Path | None:
    """The folder within another that holds such a file, as where an archive with one top folder was unpacked."""
    return next((each for each in sorted(folder.expanduser().glob("*/")) if (each / name).is_file()), None)
