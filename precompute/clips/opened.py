"""Open an untrusted video file by FFmpeg, in PyAV.

Containers and codecs are allow-listed, no other file is ever opened, and the cost of opening is limited.
"""

import ctypes
import os
import re
from enum import Enum
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from cache_store.errors import ConfigError, install
from precompute.images.not_images import HEAD_BYTES, describe_file
from precompute.images.parts import boxes
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
MAX_ALLOCATION = 2**27
"""Most bytes that FFmpeg allocates at once, in the whole process; a frame of 8K in 10 bits has 100 million."""
MAX_STREAMS = 100
PROBE_BYTES = 5_000_000
"""Most bytes that FFmpeg reads to find out about streams whose headers do not tell."""

CODED_PIXELS = 2**20
"""Pixels by which a decoder's frame may exceed the visible one, because it has whole blocks."""

MAX_SAMPLES = 2_000_000
"""Most samples of all tracks: 9 hours of video at 60 frames per second. FFmpeg takes up to 70 bytes for each."""
MAX_TABLES = 64 * 2**20
"""Bytes of all boxes besides the samples themselves."""
MAX_BOXES = 100_000
"""At the top level; a fragmented file has two for each of its fragments."""

OTHER_CONTAINERS = (b"RIFF", b"\x1a\x45\xdf\xa3")
"""First bytes of AVI and Matroska, in which each sample takes bytes of its own."""

PASSED_OVER = frozenset({b"mdat", b"free", b"skip"})
"""Boxes in which FFmpeg looks for no others."""

NUM_SAMPLES = re.compile(rb"stsz.{8}(.{4})|stz2.{8}(.{4})|trun.{4}(.{4})", re.DOTALL)
DURATIONS = re.compile(rb"stts.{4}(.{4}).{4}(.{4})", re.DOTALL)
ONE = b"\0\0\0\1"


@cache
def load_av() -> ModuleType:
    """Import PyAV, and bound what FFmpeg allocates at once; raise ConfigError if it is not installed."""
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
    """Make a member for a kind of side data that PyAV does not name, such as the view of spatial video (MV-HEVC).

    Without it PyAV lists none of a frame's side data.
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


def refuse_claims(file: BinaryIO) -> None:
    """Raise Rejected for an MP4 or QuickTime file whose tables claim many samples: FFmpeg indexes them all on opening.

    Four bytes can claim billions. Tables are searched by their names, because FFmpeg accepts boxes in many places.
    """
    file.seek(0)
    if file.read(4).startswith(OTHER_CONTAINERS):
        return
    num_bytes = num_samples = 0
    for num_boxes, (size, name) in enumerate(boxes(file)):
        if num_boxes == MAX_BOXES:
            raise Rejected("too many parts", f"the file has more than {MAX_BOXES:,} boxes")
        if name in PASSED_OVER:
            continue
        content = file.read(min(size, MAX_TABLES))
        num_bytes += len(content)
        if num_bytes >= MAX_TABLES:
            raise Rejected("too many parts", f"the file's tables have {MAX_TABLES:,} bytes or more")
        if b"cmov" in content:
            raise Rejected("cannot decode", "the tables are compressed, as in old QuickTime files")
        num_samples += sum(map(claimed_samples, content.split(b"trak")))
        if num_samples > MAX_SAMPLES:
            raise Rejected("too many parts", f"the file's tables claim more than {MAX_SAMPLES:,} samples")


def claimed_samples(track: bytes) -> int:
    """Return how many samples the tables of a track claim; of uncompressed sound FFmpeg indexes none singly."""
    durations = DURATIONS.findall(track)
    if b"soun" in track and durations and all(each == (ONE, ONE) for each in durations):
        return 0
    return sum(int.from_bytes(b"".join(groups), "big") for groups in NUM_SAMPLES.findall(track))


def open_video(file: BinaryIO, max_pixels: int) -> tuple[UnnamedFile, "InputContainer", "VideoStream"]:
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
    return source, container, stream


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
