"""Open an untrusted video file by FFmpeg, in PyAV.

Containers and codecs are allow-listed, nothing but the given file is ever opened, and what FFmpeg takes to open it is
limited.
"""

import ctypes
import os
from enum import Enum
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from cache_store.errors import ConfigError, install
from precompute.images.not_images import HEAD_BYTES, describe_file
from precompute.images.rejected import Rejected, refuse_many_pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"})
"""Suffixes of video files; how a file is read is decided by its content alone."""

DEMUXERS = ("mov", "matroska", "avi")
"""FFmpeg's names: MP4, M4V and QuickTime are `mov`, WebM is `matroska`. Playlists and scripts are none of them."""

DECODERS = {
    "h264": "H.264",
    "hevc": "HEVC",
    "vp8": "VP8",
    "vp9": "VP9",
    "libdav1d": "AV1",
    "mpeg4": "MPEG-4",  # the Xvid and DivX of older collections, such as UCF-101
}
"""Codecs by FFmpeg's names of their decoders."""

FORGIVING = frozenset({"h264"})
"""Decoders that mark damaged frames without being strict. When strict, H.264's refuses sound files that were cut
without encoding them again, because those begin with references to absent frames."""

DAMAGED = "damaged video"
"""Kind of reject for a video that cannot be read or decoded to its end."""

READ_BYTES = 2**20
"""Bytes of one read."""
MAX_ALLOCATION = 2**27
"""Most bytes that FFmpeg allocates at once, in the whole process; a frame of 8K in 10 bits has 100 million."""
MAX_STREAMS = 100
PROBE_BYTES = 5_000_000
"""Most bytes that FFmpeg reads to find out about streams whose headers do not tell."""

CODED_PIXELS = 2**20
"""Pixels by which a decoder's frame may exceed the visible one, because it has whole blocks."""


@cache
def load_av() -> ModuleType:
    """Import PyAV, whose FFmpeg logs nothing unless asked to, and bound what it allocates at once.

    Raises ConfigError if it is not installed.
    """
    try:
        import av
        from av.sidedata.sidedata import Type
    except ModuleNotFoundError:
        raise ConfigError(f"videos need PyAV, which is not installed; run {install('video')}") from None
    ffmpeg = ctypes.CDLL(av._core.__file__)  # it finds functions of the libraries that the module is linked to
    if hasattr(ffmpeg, "av_max_alloc"):  # not where they are linked in statically
        ffmpeg.av_max_alloc(ctypes.c_size_t(MAX_ALLOCATION))
    Type._missing_ = classmethod(name_unknown_side_data)  # type: ignore[assignment]
    return av


def name_unknown_side_data(kinds: type[Enum], number: int) -> Enum:
    """Make a member for a kind of side data that PyAV does not name, because it then lists none of a frame's.

    Frames of spatial video (MV-HEVC) have such a kind, 29, their view; FFmpeg decodes the base view.
    """
    kind = object.__new__(kinds)
    kind._name_, kind._value_ = f"KIND_{number}", number
    return kind


class UnnamedFile:
    """A file as FFmpeg sees it: without a name to guess by; where the real one fails, it ends, and keeps the error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: Exception | None = None

    def read(self, size: int) -> bytes:
        try:
            return b"" if self._error else self._file.read(size)
        except Exception as error:  # noqa: BLE001 (raised by `raise_error`; FFmpeg would lose it)
            self._error = error
            return b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._file.seek(offset, whence)
        except (ValueError, OSError):  # damaged files seek before their beginning
            return -1

    def tell(self) -> int:
        return self._file.tell()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Opened(NamedTuple):
    source: UnnamedFile
    container: "InputContainer"
    stream: "VideoStream"


def open_video(file: BinaryIO, max_pixels: int) -> Opened:
    """Open a file, to decode its first video stream by one thread; Rejected if it cannot be."""
    av = load_av()
    file.seek(0)
    source = UnnamedFile(file)
    decoding = {"max_pixels": str(max_pixels + CODED_PIXELS)}
    lists = {"format_whitelist": DEMUXERS, "codec_whitelist": DECODERS, "protocol_whitelist": ("none",)}
    options = {name: ",".join(allowed) for name, allowed in lists.items()}
    options |= {"max_streams": str(MAX_STREAMS), "probesize": str(PROBE_BYTES), **decoding}
    try:
        container = av.open(source, "r", options=options, buffer_size=READ_BYTES, metadata_errors="replace")
    except av.FFmpegError:
        source.raise_error()
        file.seek(0)
        raise Rejected("cannot decode", describe_file(file.read(HEAD_BYTES), "video")) from None
    try:
        source.raise_error()
        stream = choose_stream(container, max_pixels)
    except BaseException:
        container.close()
        raise
    errors = {} if stream.codec_context.name in FORGIVING else {"err_detect": "explode"}
    stream.codec_context.options = decoding | errors
    stream.codec_context.thread_count = 1
    for other in container.streams:
        if other.index != stream.index:
            other.discard = av.stream.Discard.all
    return Opened(source, container, stream)


def choose_stream(container: "InputContainer", max_pixels: int) -> "VideoStream":
    """Return the first video stream; a cover picture is none."""
    cover = load_av().stream.Disposition.attached_pic
    stream = next((each for each in container.streams.video if not each.disposition & cover), None)
    if stream is None:
        raise Rejected("no video stream", "the file has none, or only pictures as its cover")
    if stream.codec_context is None or stream.codec_context.name not in DECODERS:
        raise Rejected("cannot decode", f"the codec is none of {', '.join(DECODERS.values())}")
    refuse_many_pixels(stream.width, stream.height, max_pixels)
    if not stream.time_base:
        raise Rejected(DAMAGED, "the stream has no unit of time")
    return stream
