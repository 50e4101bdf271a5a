"""Rules that make buckets for each image: diffusers' ladder and list, and ai-toolkit.

Their arithmetic is kept, floats and the order of equals included.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, floor, sqrt

from cache_store.format.array import Size, SizeRule
from precompute.images.buckets.placement import (
    Placement,
    Sides,
    covering_scale,
    keep_middle,
    scale_by,
)

DIFFUSERS_ASPECTS = ((1, 1), (4, 5), (5, 4), (2, 3), (3, 2), (3, 4), (4, 3), (9, 16), (16, 9), (1, 2), (2, 1))


@lru_cache(maxsize=4_096)
def diffusers_ladder(resolution: int, step: int) -> Sequence[Sides]:
    """List the sizes of about resolution² pixels, in the order of their aspects."""
    sizes = []
    for aspect in (across / down for across, down in DIFFUSERS_ASPECTS):
        height = (resolution**2 / aspect) ** 0.5
        sizes.append((max(step, round(height * aspect / step) * step), max(step, round(height / step) * step)))
    return [*dict.fromkeys(sizes)]


def place_diffusers(rule: SizeRule, size: Sides) -> Placement:
    """Choose from the list, or from a ladder of at most the image's own pixels; the last of equals wins.

    The measure is not divided by the bucket's size, so in a list of unequal sizes it prefers small ones.
    """
    width, height = size
    resolution = min(rule.resolution, round((width * height) ** 0.5))
    buckets = rule.sizes or diffusers_ladder(resolution, rule.step)
    bucket = min(reversed(buckets), key=lambda each: abs(height * each[0] - width * each[1]))
    resized = scale_by(size, covering_scale(size, bucket), round)
    crop = round((resized[0] - bucket[0]) / 2), round((resized[1] - bucket[1]) / 2)
    return Placement(Size(1, bucket[1], bucket[0]), resized, crop)


def place_ai_toolkit(rule: SizeRule, size: Sides) -> Placement:
    """Round both sides down or up to the grid; of sizes within resolution² pixels, the nearest in pixels wins."""
    step, budget, own = rule.step, rule.resolution**2, size[0] * size[1]
    target = min(own, budget)
    scale = sqrt(target / own)
    across, down = size[0] * scale / step, size[1] * scale / step
    pairs = [(wide(across) * step, tall(down) * step) for wide in (floor, ceil) for tall in (floor, ceil)]
    fitting = [each for each in pairs if min(each) > 0 and each[0] * each[1] <= budget]
    lowest = max(step, floor(across) * step), max(step, floor(down) * step)
    bucket = min(fitting, key=lambda each: abs(each[0] * each[1] - target), default=lowest)
    return keep_middle(bucket, scale_by(size, covering_scale(size, bucket), ceil))
