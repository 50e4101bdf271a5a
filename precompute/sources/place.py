"""Where a file's bytes lie: planning writes a place in an archive into the plan, so that workers read no index."""

import io
from typing import Any, NamedTuple

from cache_store.storage.prefetch import RangeStream
from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected

MAX_FILE_BYTES = 256 * 2**20
"""Larger files are not read whole."""

HEADER_BYTES = 64 * 2**10
"""First bytes of an image that tell its size, in most JPEGs."""

MISSING = "missing"
"""Kind of reject for an image that is not there, and its fingerprint."""

DAMAGED = "damaged archive member"
"""Kind of reject for a member that is not what its archive says."""

TOO_LARGE = "too large"
"""Kind of reject for a file that is not read whole."""

STREAM_BYTES = 2**16
"""Bytes of a stream that are read at a time."""


class Place(NamedTuple):
    """A member of an archive; the fields are those of the plan's column `place`."""

    offset: int = 0
    """First byte of the member's header. In a tar, the image follows after 512 bytes."""
    length: int = 0
    """Bytes of the image in the archive, perhaps compressed."""
    size: int = 0
    """Bytes of the image."""
    crc32: int = 0
    """CRC-32 in a zip of the image, in a tar, which has none, of the member's header."""
    deflated: bool = False
    problem: str | None = None
    """Reason why it cannot be read, kind and detail."""


class Located(NamedTuple):
    """An image as planning finds it."""

    fingerprint: str
    """Changes when the file changes; MISSING if there is none that can be read."""
    place: Place | None = None
    """None if the image is in no archive."""

    def columns(self) -> dict[str, object]:
        return {"fingerprint": self.fingerprint, "place": self.place and self.place._asdict()}


NOWHERE = Located(MISSING)


def planned_place(column: dict[str, Any] | None) -> Place | None:
    return None if column is None else Place(**column)


def refuse_large(name: str, size: int, max_bytes: int = MAX_FILE_BYTES) -> None:
    if size > max_bytes:
        raise Rejected(TOO_LARGE, f"{name} is {size:,} bytes, more than {max_bytes:,}")


class PartStream(io.BufferedReader):
    """The bytes [start, start + size) of a file as a stream that can seek; a read fails if the file has changed.

    A video is read in place by it.
    """

    def __init__(self, file: File, start: int, size: int) -> None:
        part = RangeStream(size, lambda first, stop: file.part(start + first, stop - first))
        super().__init__(part, STREAM_BYTES)
        self.version = f"{file.version}:{start}"
        """Changes with the content."""
