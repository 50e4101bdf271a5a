"""Make upright RGB images, of square pixels, from decoded frames."""

# Sizes are width, height in pixels.

from fractions import Fraction
from typing import TYPE_CHECKING, cast

from PIL import Image

from precompute.clips.opened import load_av
from precompute.images.buckets import Sides
from precompute.images.decode import ORIENTATIONS, Orientation, turn_upright, upright
from precompute.images.rejected import Rejected, refuse_many_pixels

if TYPE_CHECKING:
    from av import VideoFrame

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


class Upright:
    """Converts frames of one stream: to RGB by each frame's own matrix and range, to square pixels, then turned."""

    def __init__(self, first: "VideoFrame", aspect: Fraction | None, max_pixels: int) -> None:
        """`aspect` is a pixel's width over its height; None counts as 1."""
        refuse_colours(first)
        self._turn, self._reformatter = turn_of(first), load_av().video.reformatter.VideoReformatter()
        self._square = (max(round(first.width * (aspect or 1)), 1), first.height)
        refuse_many_pixels(*self._square, max_pixels)
        self.size: Sides = upright(self._square, self._turn)
        """Size of the images."""

    def image(self, frame: "VideoFrame", resample: Image.Resampling) -> Image.Image:
        refuse_colours(frame)
        # threads: the default is one for each core
        plane = self._reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
        rgb = Image.frombytes("RGB", (frame.width, frame.height), memoryview(plane), "raw", "RGB", plane.line_size, 1)
        return turn_upright(rgb if rgb.size == self._square else rgb.resize(self._square, resample), self._turn)


def turn_of(frame: "VideoFrame") -> Orientation:
    """Return how the display matrix turns a frame; Rejected unless by multiples of 90 degrees."""
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
    """Refuse colours that would silently come out wrong."""
    if frame.color_trc in HDR:
        raise Rejected("hdr", f"the transfer function is {HDR[frame.color_trc]}; convert it to SDR first")
    if not (frame.colorspace in MATRICES or (frame.colorspace == RGB_MATRIX and frame.format.is_rgb)):
        raise Rejected("cannot decode", f"the colour matrix is number {frame.colorspace} of H.273, which is not read")
