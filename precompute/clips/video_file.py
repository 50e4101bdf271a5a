"""Decode the frames of an untrusted video file, from any time on.

The pixels that are decoded for one clip are limited. One thread decodes, so that bits and memory do not depend on the
machine. A damaged stream is rejected instead of concealed.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import chain
from math import floor
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from precompute.clips.opened import DAMAGED, load_av, open_video, refuse_claims
from precompute.images.buckets import Sides
from precompute.images.rejected import Rejected, refuse_many_pixels

if TYPE_CHECKING:
    import av
    from av.packet import Packet
    from av.video.stream import VideoStream

MAX_DECODED = 10_000_000_000
"""Pixels of all frames decoded for one clip, with those before its start: about a minute of one core."""
LEAST_PIXELS = 2**14
TOLERANCE = Fraction(1, 1000)
"""Seconds before its timestamp at which a frame counts as begun; Matroska rounds timestamps to this."""

SEEKS = 2
"""Keyframes that are tried before a file is decoded from its beginning."""

FAR = 2**50
"""A timestamp after every end, which no demuxer's arithmetic overflows."""

MOST_BACK = Fraction(1, 2)
"""Seconds by which timestamps may go back, as where Xvid packs frames; frames that do not advance are not shown."""


class Shown(NamedTuple):
    """A decoded frame, and when it is shown by the file's clock, in seconds; `end` by its own duration."""

    frame: "av.VideoFrame"
    begin: Fraction
    end: Fraction


class VideoFile:
    def __init__(self, file: BinaryIO, max_pixels: int) -> None:
        self._file, self._max_pixels, self._pixels_left = file, max_pixels, MAX_DECODED
        refuse_claims(file)
        self._open()

    def _open(self) -> None:
        self._source, self._container, self.stream = open_video(self._file, self._max_pixels)

    def close(self) -> None:
        self._container.close()

    def frames(self) -> Iterator[Shown]:
        """Decode all frames of a file that was just opened, in the order in which they are shown."""
        return self._shown(self._packets())

    def frames_from(self, time: Fraction) -> Iterator[Shown]:
        """Decode from a frame that is shown at `time`, or earlier; the same bits as from the beginning."""
        after: Fraction | None = None
        with suppress(Rejected):
            for shown in self._seek(time) or ():
                after = shown.begin
                yield shown
            if after is not None:
                return
        # after a seek, a decoder may lack earlier frames and report that as damage; from the beginning, damage counts
        self.close()
        self._open()
        yield from (each for each in self.frames() if after is None or each.begin > after)

    def _seek(self, time: Fraction) -> Iterator[Shown] | None:
        """Seek to a keyframe from which the frame shown at `time` can be decoded; None if that fails, as in AVI."""
        place = floor((time + TOLERANCE) / self._time_base)
        for _ in range(0 if self._is_avi else SEEKS):
            key = first = None
            with suppress(load_av().FFmpegError, Rejected):
                self._container.seek(place, stream=self.stream)
                packets = self._packets()
                key = next(packets, None)
                frames = self._shown(chain([key] if key else (), packets))
                first = next(frames, None)
            self._source.raise_error()
            if key is None or key.pts is None:
                return None
            if first is not None and first.frame.key_frame and first.begin <= time + TOLERANCE:
                return chain([first], frames)
            # frames that are shown before this keyframe, though stored after it, need an earlier one
            place = min(key.pts, key.pts if key.dts is None else key.dts) - 1
        return None

    def _packets(self) -> Iterator["Packet[VideoStream]"]:
        for packet in self._container.demux(self.stream):
            if packet.is_corrupt:
                raise Rejected(DAMAGED, "a packet is cut short or damaged")
            if packet.size or packet.dts is None:  # an empty packet would tell the decoder to finish
                yield packet

    def _shown(self, packets: Iterator["Packet[VideoStream]"]) -> Iterator[Shown]:
        """Decode packets; leave out frames that do not advance. Raises the errors of the file's own reader."""
        before: Shown | None = None
        size: Sides | None = None
        try:
            for frame, pts in self._decoded(packets):
                size = size or (frame.width, frame.height)
                self._refuse(frame, size)
                begin = pts * self._time_base if pts is not None else before.end if before else Fraction(0)
                shown = Shown(frame, begin, begin + self._seconds_of(frame))
                if before is None or shown.begin > before.begin:
                    yield shown
                    before = shown
                elif before.begin - shown.begin > MOST_BACK:
                    raise Rejected("timestamps", f"they go back by more than {float(MOST_BACK)} s")
        except load_av().FFmpegError:
            self._source.raise_error()
            raise Rejected(DAMAGED, "a frame cannot be decoded") from None
        self._source.raise_error()

    def _decoded(self, packets: Iterator["Packet[VideoStream]"]) -> Iterator[tuple["av.VideoFrame", int | None]]:
        """Yield each frame with its timestamp. AVI has only those of packets, which frames take in their order."""
        in_order: deque[int | None] = deque()
        for packet in packets:
            in_order.append(packet.dts)
            for frame in self.stream.decode(packet):
                self._pixels_left -= max(frame.width * frame.height, LEAST_PIXELS)
                yield frame, in_order.popleft() if self._is_avi else frame.dts if frame.pts is None else frame.pts

    def _refuse(self, frame: "av.VideoFrame", size: Sides) -> None:
        refuse_many_pixels(frame.width, frame.height, self._max_pixels)
        if (frame.width, frame.height) != size:
            raise Rejected("size changes", f"from {size[0]} x {size[1]} to {frame.width} x {frame.height} pixels")
        if frame.is_corrupt:
            raise Rejected(DAMAGED, "a frame is incomplete")
        if self._pixels_left < 0:
            raise Rejected("too costly", f"more than {MAX_DECODED:,} pixels to decode for one clip")

    @property
    def _is_avi(self) -> bool:
        return self._container.format.name == "avi"

    @property
    def _time_base(self) -> Fraction:
        assert self.stream.time_base, "checked on opening"
        return self.stream.time_base

    def _seconds_of(self, shown: "Packet[VideoStream] | av.VideoFrame") -> Fraction:
        """Return how long a frame lasts: by itself, else by the file's rate."""
        if shown.duration and shown.duration > 0:
            return shown.duration * self._time_base
        return 1 / self.stream.average_rate if self.stream.average_rate else Fraction(0)

    def end(self) -> Fraction:
        """Return when the last frame ends, by the file's clock; reads packets from the last keyframe, decodes none."""
        try:
            self._container.seek(FAR, stream=self.stream)
            end = self._last_end()
        except load_av().FFmpegError:
            end = None
        if end is None:
            self.close()
            self._open()
            end = self._last_end()
        if end is None:
            raise Rejected(DAMAGED, "no frame can be read")
        return end

    def _last_end(self) -> Fraction | None:
        last: Fraction | None = None
        with suppress(load_av().FFmpegError, Rejected):
            for packet in self._packets():
                pts = packet.dts if packet.pts is None or self._is_avi else packet.pts
                if pts is not None and not packet.is_discard:
                    end = pts * self._time_base + self._seconds_of(packet)
                    last = end if last is None else max(last, end)
        self._source.raise_error()
        return last
