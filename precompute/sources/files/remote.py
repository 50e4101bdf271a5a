"""Files at a URL: read by ranges, of which each is checked to be of the file that was opened."""

import io
from collections.abc import Iterator
from typing import Protocol

from cache_store.storage.objects.client import pool
from cache_store.storage.range_reader import RangeReader
from precompute.sources.files.ahead import AheadReader, NeighbourParts
from precompute.sources.files.file import Version, refuse_changed

PART_BYTES = 8 << 20
"""Larger ranges are fetched as several, at the same time."""


class RemoteFolder(Protocol):
    """Names below a URL: FileNotFoundError where one is not there, OSError, with what to check, for all else."""

    def __str__(self) -> str:
        """The URL, without a slash at its end."""

    def where(self, name: str) -> str:
        """A file's URL."""

    def head(self, name: str) -> Version:
        """Of the file as it is now."""

    def fetch(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        """A range within the file, whole, and of which version of it."""

    def beginning(self, name: str, length: int) -> tuple[bytes, Version]:
        """So much of a file, or all of it, and its version."""

    def files(self) -> Iterator[tuple[str, Version]]:
        """All that are there, in folders too."""


class RemoteFile:
    """A file below a URL; FileNotFoundError where there is none."""

    def __init__(self, folder: RemoteFolder, path: str, version: Version | None = None) -> None:
        self._folder, self._path, self.name = folder, path, path.rpartition("/")[2]
        self.version = version or folder.head(path)
        self.stamp = str(self.version)
        self._neighbours = NeighbourParts(self.version.size, self._fetch)

    def __str__(self) -> str:
        return self._folder.where(self._path)

    def skimmed(self) -> io.RawIOBase:
        return AheadReader(self.version.size, self._fetch)

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(RangeReader(self.version.size, lambda *span: memoryview(self._range(*span))))

    def part(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.version.size)
        if stop - start > PART_BYTES:
            return self._range(start, length)
        return self._neighbours.part(start, stop) if start < stop else b""

    def _range(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.version.size)
        if stop - start <= PART_BYTES:
            return self._fetch(start, stop) if start < stop else b""
        starts = range(start, stop, PART_BYTES)
        return b"".join(pool().map(lambda first: self._fetch(first, min(first + PART_BYTES, stop)), starts))

    def _fetch(self, start: int, stop: int) -> bytes:
        data, version = self._folder.fetch(self._path, start, stop - start)
        if version != self.version:
            refuse_changed(self)
        return data

    def refuse_changed(self) -> None:
        """Nothing to do: every range that was read has been checked."""
