"""Files at a URL: read by ranges, of which each is checked to be of the file that was opened."""

import io
from collections.abc import Iterator
from typing import Protocol

from cache_store.storage.object_client import pool
from cache_store.storage.range_reader import RangeReader
from precompute.sources.files.file import Version, refuse_changed

PART_BYTES = 8 << 20
"""Larger ranges are fetched as several, at the same time."""

COALESCED_BYTES = 64 << 10
"""Parts of a file that are no further apart are fetched as one."""


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

    def __str__(self) -> str:
        return self._folder.where(self._path)

    def raw(self) -> io.RawIOBase:
        return RangeReader(self.version.size, lambda start, length: memoryview(self.part(start, length)))

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(self.raw())

    def part(self, start: int, length: int) -> bytes:
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

    def parts(self, starts: list[int], lengths: list[int]) -> list[bytes]:
        """In any order; many are fetched at the same time, and neighbours as one."""
        parts = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        spans = spans_of(sorted(part for part in parts if part[0] < part[1]))
        fetched = pool().map(lambda span: self._fetch(*span), spans)
        found = {(0, 0): b""}
        for (first, _), data in zip(spans, fetched, strict=True):
            found |= {part: data[part[0] - first : part[1] - first] for part in spans[first, _]}
        return [found.get(part, b"") for part in parts]

    def refuse_changed(self) -> None:
        """Nothing to do: every range that was read has been checked."""


Span = tuple[int, int]


def spans_of(parts: list[Span]) -> dict[Span, list[Span]]:
    """Rising parts that lie near to each other, by the range that holds them."""
    groups: list[list[Span]] = []
    for part in parts:
        first = groups[-1][0][0] if groups else 0
        if groups and part[0] - groups[-1][-1][1] <= COALESCED_BYTES and part[1] - first <= PART_BYTES:
            groups[-1].append(part)
        else:
            groups.append([part])
    return {(group[0][0], max(end for _, end in group)): group for group in groups}
