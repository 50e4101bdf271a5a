"""Where a source's images lie: a folder, or a zip that is read in place and never unpacked."""

import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from cache_store.errors import SourceError
from precompute.rejects import Rejected

MAX_NAME_BYTES, MAX_PATH = 255, 4_000
"""Linux's own bounds on a name and, nearly, a path."""

MAX_FILE_BYTES = 256 * 2**20
"""Larger image files are rejected unread; the largest photograph formats stay well below."""

MISSING = "missing"

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""A file that is not there for us. Other errors (a disk or mount that fails) are no fault of the sample: they stop the
build, which goes on when it is run again.
"""

MEMBER_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    ValueError,
)
"""What zipfile raises for members that are cut, damaged, encrypted or compressed in a way it does not know."""


class ImageStore(Protocol):
    def names(self) -> Iterator[str]:
        """Every file's name, sorted."""

    def fingerprint(self, name: str) -> str:
        """What changes when the file changes, known without reading it; MISSING where there is no such file."""

    def read(self, name: str) -> bytes:
        """The file's bytes; Rejected where that is not possible."""


class ImageFolder:
    """Images in a folder; names are relative to it and cannot leave it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> Iterator[str]:
        def refuse(error: OSError) -> None:
            raise SourceError(f"{error.filename} cannot be listed: {error.strerror}")

        for folder, subfolders, files in os.walk(self._root, onerror=refuse):
            subfolders.sort()
            for name in sorted(files):
                yield refuse_unprintable((Path(folder) / name).relative_to(self._root).as_posix())

    def fingerprint(self, name: str) -> str:
        try:
            status = self._path(name).stat()
        except (*ABSENT, Rejected):
            return MISSING
        return f"{status.st_size}:{status.st_mtime_ns}"

    def read(self, name: str) -> bytes:
        path = self._path(name)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or device could hang
                raise Rejected("missing", f"{name} is not a file")
            refuse_large(name, status.st_size)
            return path.read_bytes()
        except ABSENT as error:
            raise Rejected("missing", f"{name}: {error.strerror}") from None

    def _path(self, name: str) -> Path:
        if is_unsafe(name):
            raise Rejected("missing", f"{name!r} is not a name inside the image folder")
        return self._root / name


class ImageZip:
    """Images in a zip; where all members share one top folder, names may leave it out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
            raise SourceError(f"{path} is not a zip that can be read: {error}") from None
        self._members = {member.filename: member for member in self._zip.infolist() if not member.is_dir()}
        tops = {PurePosixPath(name).parts[0] for name in self._members if "/" in name}
        self._prefix = f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in self._members) else ""

    def names(self) -> Iterator[str]:
        return iter(sorted(self._members))

    def fingerprint(self, name: str) -> str:
        member = self._member(name)
        return f"{member.CRC:08x}:{member.file_size}" if member else MISSING

    def read(self, name: str) -> bytes:
        member = self._member(name)
        if member is None:
            raise Rejected("missing", f"{name} is not in {self._path.name}")
        refuse_large(name, member.file_size)
        try:
            with self._zip.open(member) as stream:
                data = stream.read(member.file_size + 1)
        except MEMBER_ERRORS as error:
            raise Rejected("damaged archive member", f"{name}: {error}") from None
        refuse_large(name, len(data))
        return data

    def _member(self, name: str) -> zipfile.ZipInfo | None:
        return self._members.get(name) or self._members.get(self._prefix + name)


def is_unsafe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    too_long = any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts) or len(name) > MAX_PATH
    return not parts or name.startswith("/") or ".." in parts or "\0" in name or too_long


def refuse_unprintable(name: str) -> str:
    """Names enter tables as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the file name {os.fsencode(name)!r} is not UTF-8; rename it") from None
    return name


def refuse_large(name: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise Rejected("too large", f"{name} is {size:,} bytes, more than {MAX_FILE_BYTES:,}")


def open_image_store(path: Path) -> ImageStore:
    if path.is_dir():
        return ImageFolder(path)
    if path.is_file():
        return ImageZip(path)
    what = "is neither a folder nor a zip" if path.exists() else "does not exist"
    raise SourceError(f"images: {path} {what}; expected a folder or a zip of images")
