"""Where a rule places an image: its bucket, the size that it is scaled to, and the part that is kept."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cache_store.format.array import BucketRule

Size = tuple[int, int]
"""Width and height, in pixels."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

Aspects = Sequence[tuple[float, Size]]
"""A table of buckets, each after the number that images are compared with."""


class BucketSize(NamedTuple):
    """The size that all images of a bucket have; frames are 1 for images."""

    frames: int
    height: int
    width: int


class Placement(NamedTuple):
    """How a rule places an image: scale it to `resized`, then keep the bucket's part."""

    bucket: BucketSize
    resized: Size
    """Size that the whole image is scaled to."""
    crop: tuple[int, int]
    """Left and top of the bucket's part in the scaled image; -1 where NeMo's rule leaves a side one pixel short."""
    seen: Box | None = None
    """The part of the image, in its own pixels, that is scaled to the bucket at once, if the rule cuts first."""


def area_of(rule: BucketRule) -> int:
    """Return the most pixels of a bucket."""
    return rule.pixels or rule.resolution**2


def with_aspects(sizes: Iterable[Size]) -> Aspects:
    """Put its aspect, width over height, before each size."""
    return [(size[0] / size[1], size) for size in sizes]


def keep_middle(bucket: Size, resized: Size) -> Placement:
    """Keep the middle of the scaled image; of an odd excess, one pixel more is cut at the right and the bottom."""
    crop = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Placement(BucketSize(1, bucket[1], bucket[0]), resized, crop)


def covering_scale(size: Size, bucket: Size) -> float:
    """Return the smallest scale at which the image covers the bucket."""
    return max(bucket[0] / size[0], bucket[1] / size[1])


def scale_by(size: Size, scale: float, to_int: Callable[[float], int]) -> Size:
    return to_int(size[0] * scale), to_int(size[1] * scale)


def half_up(value: float) -> int:
    return int(value + 0.5)


def cover(size: Size, bucket: Size) -> Placement:
    """Scale an image until it covers the bucket, without floats: one side fits, the other is rounded half up."""
    (width, height), (columns, rows) = size, bucket
    if columns * height >= rows * width:
        resized = (columns, (2 * columns * height + width) // (2 * width))
    else:
        resized = ((2 * rows * width + height) // (2 * height), rows)
    return keep_middle(bucket, resized)
