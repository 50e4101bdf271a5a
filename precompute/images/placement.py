"""Where a rule places an image: its bucket, the size that it is scaled to, and the part that is kept; our own rules."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import isqrt
from operator import itemgetter
from typing import NamedTuple

import msgspec

from cache_store.format.array import Size, SizeRule
from precompute.images.rejected import Rejected

Sides = tuple[int, int]
"""Width and height, in pixels."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

Aspects = Sequence[tuple[float, Sides]]
"""A table of buckets, each after the number that images are compared with."""


class Placement(NamedTuple):
    """How a rule places an image: scale it to `resized`, then keep the part of its size, `bucket`."""

    bucket: Size
    resized: Sides
    crop: tuple[int, int]
    """Left and top of the bucket's part in the scaled image; below 0 where that is smaller, by `pad`, or by one pixel
    as NeMo's rule may leave it."""
    seen: Box | None = None
    """The part of the image, in its own pixels, that is scaled to the bucket at once, if the rule cuts first."""


def area_of(rule: SizeRule) -> int:
    return rule.pixels or rule.resolution**2


def with_aspects(sizes: Iterable[Sides]) -> Aspects:
    return [(size[0] / size[1], size) for size in sizes]


def grid_sizes(rule: SizeRule) -> set[Sides]:
    """List the largest height within the rule's pixels for every width, and the mirrored sizes."""
    sizes = set[Sides]()
    for width in range(rule.min, rule.max + 1, rule.step):
        height = min(rule.max, area_of(rule) // width // rule.step * rule.step)
        if height >= rule.min:
            sizes |= {(width, height), (height, width)}
    return sizes


def keep_middle(bucket: Sides, resized: Sides) -> Placement:
    """Keep the middle of the scaled image; an odd excess loses its extra pixel at the right and the bottom."""
    crop = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Placement(Size(1, bucket[1], bucket[0]), resized, crop)


def covering_scale(size: Sides, bucket: Sides) -> float:
    return max(bucket[0] / size[0], bucket[1] / size[1])


def scale_by(size: Sides, scale: float, to_int: Callable[[float], int]) -> Sides:
    return to_int(size[0] * scale), to_int(size[1] * scale)


def half_up(value: float) -> int:
    return int(value + 0.5)


def cover(size: Sides, bucket: Sides) -> Placement:
    """Scale an image until it covers the bucket, without floats: one side fits, the other is rounded half up."""
    (width, height), (columns, rows) = size, bucket
    if columns * height >= rows * width:
        resized = (columns, (2 * columns * height + width) // (2 * width))
    else:
        resized = ((2 * rows * width + height) // (2 * height), rows)
    return keep_middle(bucket, resized)


def cut_first(size: Sides, bucket: Sides) -> Placement:
    """Cut the middle that has the bucket's aspect, a fractional box, and scale that to the bucket at once."""
    left, top, right, bottom = seen = box_of_aspect(size, bucket[0] / bucket[1])
    scale = bucket[0] / (right - left), bucket[1] / (bottom - top)
    resized = max(half_up(size[0] * scale[0]), bucket[0]), max(half_up(size[1] * scale[1]), bucket[1])
    crop = min(half_up(left * scale[0]), resized[0] - bucket[0]), min(half_up(top * scale[1]), resized[1] - bucket[1])
    return Placement(Size(1, bucket[1], bucket[0]), resized, crop, seen)


def box_of_aspect(size: Sides, aspect: float) -> Box:
    """Return the middle of an image that has an aspect, as Pillow's `ImageOps.fit` does."""
    width, height = size
    seen_width = aspect * height if width / height > aspect else width
    seen_height = width / aspect if width / height < aspect else height
    left, top = (width - seen_width) * 0.5, (height - seen_height) * 0.5
    return left, top, left + seen_width, top + seen_height


# Rules that give all images the one size that is listed.


def place_squash(rule: SizeRule, size: Sides) -> Placement:
    ((width, height),) = rule.sizes
    return Placement(Size(1, height, width), (width, height), (0, 0))


def place_crop(rule: SizeRule, size: Sides) -> Placement:
    """Keep the middle, with the target's aspect, as Pillow's `ImageOps.fit` does."""
    (target,) = rule.sizes
    return cut_first(size, target)


def place_pad(rule: SizeRule, size: Sides) -> Placement:
    """Scale the whole image to fit inside, as Pillow's `ImageOps.contain`, between the borders of `ImageOps.pad`."""
    ((across, down),), (width, height) = rule.sizes, size
    columns = round(width / height * down) if width / height < across / down else across
    rows = round(height / width * across) if width / height > across / down else down
    crop = -round((across - columns) * 0.5), -round((down - rows) * 0.5)
    return Placement(Size(1, down, across), (columns, rows), crop)


def place_edge(rule: SizeRule, size: Sides) -> Placement:
    """Scale the shorter side to the rule's resolution, as transformers' image processors do, and keep the middle."""
    (target,), side = rule.sizes, rule.resolution
    longer = int(side * max(size) / min(size))
    return keep_middle(target, (side, longer) if size[0] <= size[1] else (longer, side))


# The rule `ours` compares no floats that could tie wrongly: exchanging width and height of an image exchanges those of
# its bucket.

ASPECT = itemgetter(0)


def with_bounds(rule: SizeRule) -> SizeRule:
    """Fill in the shortest and longest side: a quarter and the double of the square's."""
    if rule.sizes:
        return rule
    square, step = isqrt(area_of(rule)), rule.step
    shortest, longest = max(step, square // 4 // step * step), square * 2 // step * step
    return msgspec.structs.replace(rule, min=rule.min or shortest, max=rule.max or max(longest, rule.min))


@lru_cache
def sizes_within(rule: SizeRule) -> Aspects:
    return sorted(with_aspects(rule.sizes or grid_sizes(rule)))


def place_ours(rule: SizeRule, size: Sides) -> Placement:
    table = sizes_within(rule)
    if rule.no_upscale:
        table = [entry for entry in table if entry[1][0] <= size[0] and entry[1][1] <= size[1]]
    return cover(size, nearest(table, size) if table else within(rule, size))


def nearest(table: Aspects, size: Sides) -> Sides:
    """Choose the nearest aspect; of equals the image's own size, then more pixels, then the shorter longest side.

    The quotient of two aspects orders as the distance of their logarithms does. It is one division of exact integers,
    so equal distances compare equal.
    """
    width, height = size

    def rank(bucket: Sides) -> tuple[float, bool, int, int, Sides]:
        bucket_part, image_part = bucket[0] * height, bucket[1] * width
        quotient = max(bucket_part, image_part) / min(bucket_part, image_part)
        return quotient, bucket != size, -bucket[0] * bucket[1], max(bucket), bucket

    place = bisect_left(table, width / height, key=ASPECT)
    below, above = table[max(place - 1, 0)][0], table[min(place, len(table) - 1)][0]
    between = table[bisect_left(table, below, key=ASPECT) : bisect_right(table, above, key=ASPECT)]
    return min((bucket for _, bucket in between), key=rank)


def within(rule: SizeRule, size: Sides) -> Sides:
    """Return the largest size of the grid inside an image that covers no bucket, within the rule's bounds."""
    if rule.sizes:
        raise Rejected("too small", f"{size[0]} x {size[1]} pixels cover none of the bucket sizes")
    width, height = (min(side, rule.max) // rule.step * rule.step for side in size)
    if min(width, height) == 0:
        raise Rejected("too small", f"{size[0]} x {size[1]} pixels, and buckets have sides of at least {rule.step}")
    longest = area_of(rule) // min(width, height) // rule.step * rule.step
    return min(width, longest), min(height, longest)
