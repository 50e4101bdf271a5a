"""Buckets: the sizes of a cache of images of many aspects, and the rule that gives each image one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Literal, NamedTuple

from cache_store.errors import ConfigError
from cache_store.format.array import BucketRule

Size = tuple[int, int]
"""Width and height, in pixels."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


DIFFERENT_SIZES = ((9, 13), (17, 5))
"""Two sizes, in steps of the buckets, that differ in height, width and area."""


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
    """Left and top of the bucket's part in the scaled image."""
    seen: Box | None = None
    """The part of the image, in its own pixels, that is scaled to the bucket at once, if the rule cuts first."""


@dataclass(frozen=True, kw_only=True)
class BucketsConfig:
    """Images of many sizes: a rule gives each image one of the sizes; docs/reference/buckets.md states every rule."""

    preset: Literal["none", "ours"] = "none"
    """none: all images get image.height and image.width. ours: every aspect within the pixels of a square of
    resolution; the nearest aspect wins, the excess is cut evenly."""
    resolution: int = 1024
    """Side of the square whose pixels a bucket may have."""
    min: int = 256
    """Shortest side of a bucket."""
    max: int = 2048
    """Longest side of a bucket."""
    step: int = 64
    """Sides are multiples of it."""

    def __post_init__(self) -> None:
        if self.preset != "none" and not self.step <= self.min <= self.resolution <= self.max:
            raise ConfigError("image.buckets needs step <= min <= resolution <= max")

    @property
    def rule(self) -> BucketRule:
        """The rule as a cache records it."""
        return BucketRule(preset=self.preset, resolution=self.resolution, min=self.min, max=self.max, step=self.step)


@lru_cache(2**14)
def place(rule: BucketRule, size: Size) -> Placement:
    """Place an image of this size (width, height); raise Rejected if the rule leaves it out."""
    return RULES[rule.preset](rule, size)


def place_ours(rule: BucketRule, size: Size) -> Placement:
    """Choose the nearest aspect, by the logarithm; of two as near, the bucket of more pixels."""
    aspect = log(size[0] / size[1])
    bucket = min(sizes_within(rule), key=lambda each: (abs(log(each[0] / each[1]) - aspect), -each[0] * each[1], each))
    return cover(size, bucket)


@lru_cache
def sizes_within(rule: BucketRule) -> Sequence[Size]:
    """List, for every width, the largest height within the budget, and the mirrored sizes."""
    sizes = set[Size]()
    for width in range(rule.min, rule.max + 1, rule.step):
        height = min(rule.max, rule.resolution**2 // width // rule.step * rule.step)
        if height >= rule.min:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def cover(size: Size, bucket: Size) -> Placement:
    """Scale an image until it covers the bucket, each side rounded half up; keep the middle."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    width, height = (max(side, int(before * scale + 0.5)) for before, side in zip(size, bucket, strict=True))
    crop = (width - bucket[0]) // 2, (height - bucket[1]) // 2
    return Placement(BucketSize(1, bucket[1], bucket[0]), (width, height), crop)


RULES: dict[str, Callable[[BucketRule, Size], Placement]] = {"ours": place_ours}
