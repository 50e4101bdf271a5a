"""Rules whose sizes are those of a grid within a number of pixels: sd-scripts, musubi-tuner and NovelAI.

Their arithmetic is kept, floats and the order of equals included.
"""

from functools import lru_cache
from itertools import takewhile
from math import log, sqrt

import msgspec

from cache_store.format.array import SizeRule
from precompute.images.buckets.placement import (
    Aspects,
    Placement,
    Sides,
    area_of,
    cover,
    covering_scale,
    half_up,
    keep_middle,
    scale_by,
    with_aspects,
)
from precompute.images.rejected import Rejected


def nearest_aspect(table: Aspects, aspect: float) -> Sides:
    """Choose by the plain difference of aspects; the first of equals wins."""
    return min(table, key=lambda entry: abs(entry[0] - aspect))[1]


def refuse_empty(size: Sides, bucket: Sides, step: int) -> None:
    """Raise Rejected for a bucket without pixels, which the projects' own code cannot handle either."""
    if min(bucket) < 1:
        raise Rejected("too small", f"{size[0]} x {size[1]} pixels leave no side of {step}")


@lru_cache
def sd_scripts_sizes(rule: SizeRule) -> Aspects:
    area, step = area_of(rule), rule.step
    square = int(sqrt(area) // step) * step
    sizes = {(square, square)}
    for width in range(rule.min, rule.max + 1, step):
        height = min(rule.max, area // width // step * step)
        if height >= rule.min:
            sizes |= {(width, height), (height, width)}
    return with_aspects(sorted(sizes))


def place_sd_scripts(rule: SizeRule, size: Sides) -> Placement:
    """Choose the image's own size, or else the first of the nearest aspects."""
    if rule.no_upscale:
        return place_sd_scripts_without_upscale(rule, size)
    table, aspect = sd_scripts_sizes(rule), size[0] / size[1]
    bucket = size if any(each == size for _, each in table) else nearest_aspect(table, aspect)
    scale = bucket[1] / size[1] if aspect > bucket[0] / bucket[1] else bucket[0] / size[0]
    return keep_middle(bucket, scale_by(size, scale, half_up))


def place_sd_scripts_without_upscale(rule: SizeRule, size: Sides) -> Placement:
    """Scale an image of too many pixels to a bucket of its own; cut a smaller one to the grid."""
    step, aspect, resized = rule.step, size[0] / size[1], size

    def on_grid(side: float) -> int:
        return half_up(side) // step * step

    if size[0] * size[1] > area_of(rule):
        width = sqrt(area_of(rule) * aspect)
        height = area_of(rule) / width
        columns, rows = on_grid(width), on_grid(height)
        rows_of_columns, columns_of_rows = on_grid(columns / aspect), on_grid(rows * aspect)
        refuse_empty(size, (rows, rows_of_columns), step)
        if abs(columns / rows_of_columns - aspect) < abs(columns_of_rows / rows - aspect):
            resized = (columns, half_up(columns / aspect))
        else:
            resized = (half_up(rows * aspect), rows)
    bucket = (resized[0] // step * step, resized[1] // step * step)
    refuse_empty(size, bucket, step)
    return keep_middle(bucket, resized)


@lru_cache
def musubi_sizes(rule: SizeRule) -> Aspects:
    area, step = area_of(rule), rule.step
    square = int(sqrt(area))
    widths = range(square // 2 // step * step, square + step, step)
    sizes = {(width, area // width // step * step) for width in widths if width}
    return with_aspects(sorted(sizes | {(height, width) for width, height in sizes}))


def place_musubi(rule: SizeRule, size: Sides) -> Placement:
    """Choose the first of the nearest aspects; without upscaling, cut an image of few pixels to the grid."""
    if rule.no_upscale and size[0] * size[1] <= area_of(rule):
        bucket = (size[0] // rule.step * rule.step, size[1] // rule.step * rule.step)
        refuse_empty(size, bucket, rule.step)
    else:
        bucket = nearest_aspect(musubi_sizes(rule), size[0] / size[1])
    return keep_middle(bucket, scale_by(size, covering_scale(size, bucket), half_up))


def with_budget(rule: SizeRule) -> SizeRule:
    """Fill in the pixels: half as many again as the square's, as NovelAI's 768 x 512 beside 512 x 512."""
    return msgspec.structs.replace(rule, pixels=rule.pixels or rule.resolution**2 * 3 // 2)


@lru_cache
def novelai_sizes(rule: SizeRule) -> Aspects:
    sides = range(rule.min, rule.max + 1, rule.step)
    sizes = set[Sides]()
    for width in sides:
        heights = [*takewhile(lambda height: width * height <= rule.pixels, sides)]  # noqa: B023 (used at once)
        if heights:
            sizes |= {(width, heights[-1]), (heights[-1], width)}
            if width == rule.resolution in heights:
                sizes.add((width, width))
    return with_aspects(sorted(sizes, key=lambda size: (size[0], -size[1])))


def place_novelai(rule: SizeRule, size: Sides) -> Placement:
    """Choose the first of the nearest aspects, by the logarithm; skip an image whose aspect is too far away."""
    aspect, most = size[0] / size[1], rule.max_aspect_error
    assert most, "its default is filled in"
    nearest, bucket = min(novelai_sizes(rule), key=lambda entry: abs(log(entry[0]) - log(aspect)))
    if abs(nearest - aspect) >= most:
        far = f"aspect {aspect:.3g} differs from {nearest:.3g}, its bucket's, by {most:g} or more"
        raise Rejected("too wide", far)
    return cover(size, bucket)
