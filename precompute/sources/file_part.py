"""A file, or a member of an archive, as a stream that can seek: a video is read in place, some blocks at a time."""

import io

from cache_store.storage.prefetch import RangeStream
from cache_store.storage.protocol import File

STREAM_BYTES = 2**16
"""Bytes read at a time."""


class PartStream(io.BufferedReader):
    """The bytes [start, start + size) of a file; a read fails if the file has changed."""

    def __init__(self, file: File, start: int, size: int) -> None:
        part = RangeStream(size, lambda first, stop: file.part(start + first, stop - first))
        super().__init__(part, STREAM_BYTES)
        self.version = f"{file.version}:{start}"
        """Changes with the content."""
