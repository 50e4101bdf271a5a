"""Open the videos of a source, and hash each once, however many clips it gives."""

import hashlib
from io import BytesIO
from typing import BinaryIO

from cache_store.storage.prefetch import SharedResults
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.sources.file_part import PartStream
from precompute.sources.images import Images
from precompute.sources.place import TOO_LARGE, Place

DIGESTS_HELD = 1_024
"""Digests in memory; the clips of a video are neighbours in the plan."""

VIDEOS_HELD = 16
"""Most whole videos in memory: about one a thread, because clips of a video are neighbours in the plan."""

Where = tuple[Images, str, Place | None]
"""A source, and the uri and place of one of its files."""


def hash_in_place(source: Images, uri: str, place: Place | None) -> str:
    """Return the SHA-256 of a file that is too large to be read whole."""
    with source.open(uri, place) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto


class Videos:
    """Opens videos and hashes them, for several threads: each one once while its clips are decoded."""

    def __init__(self) -> None:
        self._whole = SharedResults[Where, bytes](lambda where: where[0].read(*where[1:]), VIDEOS_HELD)
        self._digests = SharedResults[tuple[Where, str], str](lambda key: hash_in_place(*key[0]), DIGESTS_HELD)

    def open(self, source: Images, uri: str, place: Place | None) -> BinaryIO:
        """Open a video as a stream: in place, or in memory if it comes from a network and is not too large."""
        if source.fetches_ahead:
            try:
                return BytesIO(self._whole.get((source, uri, place)))
            except Rejected as rejected:
                if rejected.kind != TOO_LARGE:
                    raise
        return source.open(uri, place)

    def sha256(self, source: Images, uri: str, place: Place | None, stream: BinaryIO) -> str:
        """Return the SHA-256 of a whole video that is open as `stream`; the stream stays where it is."""
        if isinstance(stream, BytesIO):
            return content_sha256(stream.getbuffer())
        assert isinstance(stream, PartStream)
        return self._digests.get(((source, uri, place), stream.version))
