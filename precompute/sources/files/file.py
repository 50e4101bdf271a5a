"""A file that a source reads, as it was when it was opened: here, or at a URL."""

import io
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from cache_store.errors import SourceError
from cache_store.storage.files import naming


class Version(NamedTuple):
    """What changes when somebody writes to a file."""

    size: int
    mark: str
    """The time of modification in nanoseconds, or what a store gives each content: its ETag."""

    def __str__(self) -> str:
        return f"{self.size}:{self.mark}"


class SourceFile(Protocol):
    """OSError, which names it, for what disk or network refuse; FileNotFoundError where there is no such file."""

    @property
    def name(self) -> str:
        """The last part of its address."""

    @property
    def version(self) -> Version:
        """When it was opened."""

    @property
    def stamp(self) -> str:
        """When it was opened: its version, and what else shows that somebody wrote to it and set its time back."""

    def __str__(self) -> str:
        """Its address."""

    def skimmed(self) -> io.RawIOBase:
        """To read it from the beginning to the end, with gaps; by one thread."""

    def open(self) -> io.BufferedReader:
        """To read it; SourceError where it has changed since."""

    def part(self, start: int, length: int) -> bytes:
        """Bytes of it; fewer at its end, SourceError where it has changed since."""

    def refuse_changed(self) -> None:
        """SourceError where it has changed since."""


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, path.name
        status = path.stat()
        self.version, self.stamp = version_of(status), f"{version_of(status)}:{status.st_ctime_ns}"

    def __str__(self) -> str:
        return str(self._path)

    def skimmed(self) -> io.RawIOBase:
        return io.FileIO(self._path)

    def open(self) -> io.BufferedReader:
        self.refuse_changed()
        return self._path.open("rb")

    @cached_property
    def _descriptor(self) -> int:
        """Of the file, also once it is deleted: opened once, for which a network's file system is asked, too."""
        return os.open(self._path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_descriptor" in vars(self):
            os.close(self._descriptor)

    def part(self, start: int, length: int) -> bytes:
        with naming(self._path):
            data = os.pread(self._descriptor, length, start)
        if version_of(os.fstat(self._descriptor)) != self.version:
            refuse_changed(self)
        return data

    def refuse_changed(self) -> None:
        if version_of(self._path.stat()) != self.version:
            refuse_changed(self)


def version_of(status: os.stat_result) -> Version:
    return Version(status.st_size, str(status.st_mtime_ns))


def refuse_changed(file: SourceFile) -> NoReturn:
    raise SourceError(f"{file} was changed while it was read; restore it and run the same command again")
