"""A file, or a member of an archive, as a stream that can seek: a video is read in place, some blocks at a time."""

import io
import os
from typing import Any

from cache_store.storage.protocol import File

STREAM_BYTES = 2**16
"""Bytes read at a time."""


class FilePart(io.RawIOBase):
    """A range of a file as a stream that can seek; a read fails if the file has changed."""

    def __init__(self, file: File, start: int, size: int) -> None:
        self._file, self._start, self._size, self._place = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if (place := base + offset) < 0:
            raise ValueError(f"seek to {place}")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._place))
        data = self._file.part(self._start + self._place, length) if length else b""
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


class PartStream(io.BufferedReader):
    """The bytes [start, start + size) of a file; a read fails if the file has changed."""

    def __init__(self, file: File, start: int, size: int) -> None:
        super().__init__(FilePart(file, start, size), STREAM_BYTES)
        self.version = f"{file.version}:{start}"
        """Changes with the content."""
