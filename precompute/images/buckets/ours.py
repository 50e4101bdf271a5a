"""The rule `ours`: the nearest aspect, by its logarithm, of sizes within a budget of pixels. It compares no floats that
could tie wrongly: exchanging width and height of an image exchanges those of its bucket.
"""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from math import isqrt
from operator import itemgetter

import msgspec

from cache_store.format.array import SizeRule
from precompute.images.buckets.placement import Aspects, Placement, Sides, area_of, cover, with_aspects
from precompute.images.rejected import Rejected

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
    """List, for every width, the largest height within the budget, and the mirrored sizes; by aspect."""
    sizes = set(rule.sizes)
    for width in () if rule.sizes else range(rule.min, rule.max + 1, rule.step):
        height = min(rule.max, area_of(rule) // width // rule.step * rule.step)
        if height >= rule.min:
            sizes |= {(width, height), (height, width)}
    return sorted(with_aspects(sizes))


def place_ours(rule: SizeRule, size: Sides) -> Placement:
    """Choose the nearest bucket; with `no_upscale`, the nearest of those that the image covers."""
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
