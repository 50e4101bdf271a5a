"""Clips of video files: which frames a clip has, by their timestamps, as fitted upright RGB images.

Frame j of a clip is the one shown at `start + j / fps` seconds after the video's first frame. A frame counts as begun
1 ms before its timestamp, and the last one lasts for its duration. Times are exact fractions.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from fractions import Fraction
from itertools import chain, islice
from math import ceil
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from PIL import Image

from cache_store.format.array import ClipRecipe, ImageRecipe, Size
from precompute.clips.opened import DAMAGED, load_av
from precompute.clips.video_file import TOLERANCE, Shown, VideoFile
from precompute.images.buckets import Placement, Sides
from precompute.images.decode import ORIENTATIONS, Orientation, turn_upright, upright
from precompute.images.fit import RESAMPLING, fit_image, placement_of, unreduced
from precompute.images.rejected import Rejected, refuse_many_pixels, rejecting

if TYPE_CHECKING:
    from av import VideoFrame

MAX_SECONDS = 360_000
"""The longest video, 100 hours; a damaged timestamp would make a plan of millions of clips."""

MAX_RATE = 1_000
"""Frames per second that a video can have, as timestamps of Matroska tell them."""

MAX_DENOMINATOR = 1_000_000
"""Largest denominator of the fraction that a float stands for, such as 30000/1001, of seconds or frames a second."""

EXIF_NUMBERS = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}
"""EXIF's orientations, by the signs of a display matrix's a, b, c, d: it shows a pixel at (ax + cy, bx + dy)."""

PLACES = (0, 1, 3, 4)
"""Indices of a, b, c, d in the nine integers of a display matrix."""

HDR = {16: "PQ", 18: "HLG"}
"""Transfer functions of high dynamic range, by their numbers in ITU-T H.273."""

RGB_MATRIX = 0
MATRICES = frozenset({1, 2, 4, 5, 6, 7, 9})
"""Matrices of YUV that FFmpeg converts by, by their numbers in ITU-T H.273; it takes 2, unspecified, for BT.601's."""


class Video(NamedTuple):
    width: int
    """Square pixels of the upright video; likewise `height`."""
    height: int
    seconds: float
    """From the first frame's timestamp to the end of the last frame."""
    frames: int
    """Exact in MP4, QuickTime and AVI, else by the average rate."""
    rate: float

    def num_frames(self, fps: float | None) -> int:
        if fps is None:
            return self.frames
        return max(ceil((exact(self.seconds) - TOLERANCE) * exact(fps)), 0)


class Clip(NamedTuple):
    """A clip's frames while they are decoded."""

    size: Sides
    """Size of the upright video, before its frames are fitted."""
    placement: Placement
    images: Iterator[Image.Image]
    """As many as planned, of the planned size; Rejected is raised in the place of one that is missing."""
    is_interlaced: bool


def exact(value: float) -> Fraction:
    return Fraction(value).limit_denominator(MAX_DENOMINATOR)


class Upright:
    """Converts frames of one stream: to RGB by each frame's own matrix and range, to square pixels, then turned."""

    def __init__(self, first: "VideoFrame", aspect: Fraction | None, max_pixels: int) -> None:
        """`aspect` is a pixel's width over its height, 1 by default."""
        refuse_colours(first)
        self._turn, self._reformatter = turn_of(first), load_av().video.reformatter.VideoReformatter()
        self._square = (max(round(first.width * (aspect or 1)), 1), first.height)
        refuse_many_pixels(*self._square, max_pixels)
        self.size: Sides = upright(self._square, self._turn)

    def image(self, frame: "VideoFrame", resample: Image.Resampling) -> Image.Image:
        refuse_colours(frame)
        # threads: the default is one for each core
        plane = self._reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
        rgb = Image.frombytes("RGB", (frame.width, frame.height), memoryview(plane), "raw", "RGB", plane.line_size, 1)
        return turn_upright(rgb if rgb.size == self._square else rgb.resize(self._square, resample), self._turn)


def turn_of(frame: "VideoFrame") -> Orientation:
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Orientation()
    matrix = memoryview(cast(bytes, data)).cast("i")
    largest = max(abs(matrix[place]) for place in PLACES)
    a, b, c, d = (round(matrix[place] / largest) if largest else 0 for place in PLACES)
    if (number := EXIF_NUMBERS.get((a, b, c, d))) is None:
        raise Rejected("cannot decode", "the display matrix turns frames by no multiple of 90 degrees")
    return ORIENTATIONS.get(number, Orientation())


def refuse_colours(frame: "VideoFrame") -> None:
    if frame.color_trc in HDR:
        raise Rejected("hdr", f"the transfer function is {HDR[frame.color_trc]}; convert it to SDR first")
    if not (frame.colorspace in MATRICES or (frame.colorspace == RGB_MATRIX and frame.format.is_rgb)):
        raise Rejected("cannot decode", f"the colour matrix is number {frame.colorspace} of H.273, which is not read")


@rejecting(OSError)
def probe_video(file: BinaryIO, max_pixels: int) -> Video:
    """Read a video's size and length, by its first frame and its last packets; raise Rejected if it cannot be read."""
    with closing(VideoFile(file, max_pixels)) as video:
        first, _ = first_of(video.frames())
        width, height = Upright(first.frame, video.stream.sample_aspect_ratio, max_pixels).size
        seconds = max(video.end(), first.end) - first.begin
        if seconds > MAX_SECONDS:
            raise Rejected("too long", f"more than {MAX_SECONDS:,} s by its timestamps")
        stated = video.stream.average_rate or 0
        by_rate = round(seconds * stated)
        frames = min(video.stream.frames or by_rate, by_rate)  # an edit list may hide some, a variable rate be guessed
    frames = min(max(frames, 1), ceil(seconds * MAX_RATE) or 1)
    rate = stated if frames == by_rate else frames / seconds if seconds else 0  # Matroska rounds the seconds
    return Video(width, height, float(seconds), frames, float(rate))


@rejecting(OSError)
def decode_clip(file: BinaryIO, start: float, recipe: ImageRecipe, planned: Size) -> Clip:
    """Decode the clip of the planned size that begins `start` seconds after the video's first frame.

    Raises Rejected, or its reader's error, here or while the images are taken.
    """
    clip = recipe.clip
    assert clip, "a recipe of images"
    with ExitStack() as stack:
        video = stack.enter_context(closing(VideoFile(file, recipe.max_pixels)))
        first, frames = first_of(video.frames())
        how = Upright(first.frame, video.stream.sample_aspect_ratio, recipe.max_pixels)
        begin = first.begin + exact(start)
        if begin >= first.end:
            frames = video.frames_from(begin)
        try:
            placement = placement_of(how.size, recipe, planned)
        except Rejected:
            refuse_without_bucket(file, start, recipe)
            raise
        opened, shown = stack.pop_all(), shown_in(clip, planned.frames, begin, frames)

    def images() -> Iterator[Image.Image]:
        """Fit frames, each once however often it is shown, then close the video."""
        with opened, rejecting(OSError):
            count, before, image = 0, None, None
            for each in shown:
                if image is None or each is not before:
                    rgb = how.image(each.frame, RESAMPLING[recipe.resample])
                    image, before = fit_image(unreduced(rgb), recipe, placement), each
                count += 1
                yield image
        if count < planned.frames:
            raise too_short(count, planned.frames, clip.fps, start)

    return Clip(how.size, placement, images(), bool(first.frame.interlaced_frame))


def shown_in(clip: ClipRecipe, count: int, begin: Fraction, frames: Iterator[Shown]) -> Iterator[Shown]:
    if clip.fps is None:
        return islice((each for each in frames if each.begin >= begin - TOLERANCE), count)
    rate = exact(clip.fps)
    return shown_at((begin + j / rate for j in range(count)), frames)


def first_of(frames: Iterator[Shown]) -> tuple[Shown, Iterator[Shown]]:
    first = next(frames, None)
    if first is None:
        raise Rejected(DAMAGED, "no frame can be decoded")
    return first, chain([first], frames)


def shown_at(times: Iterator[Fraction], frames: Iterator[Shown]) -> Iterator[Shown]:
    """Yield for each time the frame that is shown then; end where the video does."""
    current, following = next(frames), next(frames, None)
    for time in times:
        while following is not None and following.begin - TOLERANCE <= time:
            current, following = following, next(frames, None)
        if following is None and time >= current.end - TOLERANCE:
            return
        yield current


def too_short(found: int, wanted: int, fps: float | None, start: float) -> Rejected:
    rate = f" at {fps:g} fps" if fps else ""
    return Rejected("too short", f"has {found} of {wanted} frames{rate} from {start:g} s")


def refuse_without_bucket(file: BinaryIO, start: float, recipe: ImageRecipe) -> None:
    """Raise Rejected if a clip is too short for every bucket: planning puts it into its neighbour's."""
    assert recipe.clip, "a recipe of images"
    video = probe_video(file, recipe.max_pixels)
    left = video.num_frames(recipe.clip.fps) - round(start * (recipe.clip.fps or video.rate))
    if left < (least := recipe.clip.counts[0]):
        raise too_short(left, least, recipe.clip.fps, start)
