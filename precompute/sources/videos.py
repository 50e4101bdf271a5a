"""Open the videos of a source, and hash each once, however many clips it gives."""

import hashlib
import threading
from collections import OrderedDict
from io import BytesIO
from typing import BinaryIO

from cache_store.storage.prefetch import SharedResults
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.sources.file_part import PartStream
from precompute.sources.image_store import Images, prefetch_of, skip_prefetch, stream_opener
from precompute.sources.place import TOO_LARGE, Place

DIGESTS_HELD = 1_024
"""Digests in memory; the clips of a video are neighbours in the plan."""

VIDEOS_HELD = 16
"""Most whole videos in memory: about one a thread, because clips of a video are neighbours in the plan."""


class Videos:
    """Opens videos and hashes them, for several threads: each one once while its clips are decoded."""

    def __init__(self) -> None:
        self._whole = SharedResults[tuple[Images, str, Place | None], bytes](
            lambda key: key[0].read(key[1], key[2]), VIDEOS_HELD
        )
        self._lock = threading.Lock()
        self._held = OrderedDict[tuple[str, str], tuple[threading.Lock, list[str]]]()

    def open(self, source: Images, uri: str, place: Place | None) -> BinaryIO:
        """Open a video as a stream: in place, or in memory if it comes from a network and is not too large."""
        if prefetch_of(source) is not skip_prefetch:
            try:
                return BytesIO(self._whole.get((source, uri, place)))
            except Rejected as rejected:
                if rejected.kind != TOO_LARGE:
                    raise
        return stream_opener(source)(uri, place)

    def sha256(self, uri: str, stream: BinaryIO) -> str:
        """Return the SHA-256 of a whole opened video, whose stream is then at its beginning."""
        if isinstance(stream, BytesIO):
            return content_sha256(stream.getbuffer())
        assert isinstance(stream, PartStream)
        with self._lock:
            lock, known = self._held.setdefault((uri, stream.version), (threading.Lock(), []))
            self._held.move_to_end((uri, stream.version))
            while len(self._held) > DIGESTS_HELD:
                self._held.popitem(last=False)
        with lock:
            if not known:
                known.append(hashlib.file_digest(stream, "sha256").hexdigest())
                stream.seek(0)
            return known[0]
