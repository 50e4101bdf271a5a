"""Clips of video files: which frames a clip has, by their timestamps, as fitted RGB images.

Frame j of a clip is the one shown at `start + j / fps` seconds after the video's first frame. A frame counts as begun
1 ms before its timestamp, and the last one lasts for its duration. Times are exact fractions.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from itertools import chain, islice
from math import ceil
from typing import BinaryIO, NamedTuple

from PIL import Image

from cache_store.format.array import ClipRecipe, ImageRecipe, Size
from precompute.clips.opened import DAMAGED
from precompute.clips.upright import Upright
from precompute.clips.video_file import TOLERANCE, Shown, VideoFile
from precompute.images.buckets import Placement, Sides
from precompute.images.fit import RESAMPLING, fit_image, placement_of, unreduced
from precompute.images.rejected import Rejected, rejecting

MAX_SECONDS = 360_000
"""The longest video, 100 hours; a damaged timestamp would make a plan of millions of clips."""

MAX_RATE = 1_000
"""Frames per second that a video can have, as timestamps of Matroska tell them."""

MAX_DENOMINATOR = 1_000_000
"""Largest denominator of the fraction that a float stands for, such as 30000/1001, of seconds or frames a second."""


class Video(NamedTuple):
    """What planning must know of a video file."""

    width: int
    """Pixels of the upright video, made square; likewise `height`."""
    height: int
    seconds: float
    """From the first frame's timestamp to the end of the last frame."""
    frames: int
    """Exact in MP4, QuickTime and AVI, else by the average rate."""
    rate: float
    """Average frames per second."""

    def num_frames(self, fps: float | None) -> int:
        """Return how many frames a clip of the whole video has at this rate; with None, all of them."""
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


@rejecting(OSError)
def probe_video(file: BinaryIO, max_pixels: int) -> Video:
    """Read a video's size and length; raise Rejected if it cannot be read.

    Decodes the first frame, and reads the beginning of the file and what follows its last keyframe; all of it, if it
    has no index.
    """
    with VideoFile(file, max_pixels) as video:
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

    Raises Rejected here or while the images are taken; so does the file's own reader with its errors.
    """
    assert recipe.clip, "a recipe of images"
    with ExitStack() as stack:
        video = stack.enter_context(VideoFile(file, recipe.max_pixels))
        first, frames = first_of(video.frames())
        upright = Upright(first.frame, video.stream.sample_aspect_ratio, recipe.max_pixels)
        begin = first.begin + exact(start)
        if begin >= first.end:
            frames = video.frames_from(begin)
        try:
            placement = placement_of(upright.size, recipe, planned)
        except Rejected:
            refuse_without_bucket(file, start, recipe)
            raise
        shown = shown_in(recipe.clip, planned.frames, begin, frames)
        images = fitted(shown, upright, start, recipe, placement, planned, stack.pop_all())
        return Clip(upright.size, placement, images, bool(first.frame.interlaced_frame))


def shown_in(clip: ClipRecipe, count: int, begin: Fraction, frames: Iterator[Shown]) -> Iterator[Shown]:
    """Choose a clip's frames from those of the video, from the one shown at `begin` or earlier; fewer if it ends."""
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


def fitted(
    shown: Iterator[Shown],
    upright: Upright,
    start: float,
    recipe: ImageRecipe,
    placement: Placement,
    planned: Size,
    video: ExitStack,
) -> Iterator[Image.Image]:
    """Fit frames to the recipe, then close the video; a frame that is shown twice is fitted once."""
    with video, rejecting(OSError):
        count, before, image = 0, None, None
        for each in shown:
            if image is None or each is not before:
                rgb = upright.image(each.frame, RESAMPLING[recipe.resample])
                image, before = fit_image(unreduced(rgb), recipe, placement), each
            count += 1
            yield image
    assert recipe.clip
    if count < planned.frames:
        raise too_short(count, planned.frames, recipe.clip.fps, start)


def too_short(found: int, wanted: int, fps: float | None, start: float) -> Rejected:
    rate = f" at {fps:g} fps" if fps else ""
    return Rejected("too short", f"has {found} of {wanted} frames{rate} from {start:g} s")


def refuse_without_bucket(file: BinaryIO, start: float, recipe: ImageRecipe) -> None:
    """Raise Rejected if a clip is too short for every bucket; planning puts it into its neighbour's."""
    assert recipe.clip, "a recipe of images"
    video = probe_video(file, recipe.max_pixels)
    left = video.num_frames(recipe.clip.fps) - round(start * (recipe.clip.fps or video.rate))
    if left < (least := recipe.clip.counts[0]):
        raise too_short(left, least, recipe.clip.fps, start)
