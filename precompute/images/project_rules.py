"""The rules of other projects, from sd-scripts to diffusers; `PRESETS` has their names.

Their arithmetic is kept, floats and the order of equals included.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, floor, log, sqrt

import msgspec
import numpy as np

from cache_store.format.array import Size, SizeRule
from precompute.images.placement import (
    Aspects,
    Placement,
    Sides,
    area_of,
    cover,
    covering_scale,
    cut_first,
    grid_sizes,
    half_up,
    keep_middle,
    scale_by,
    with_aspects,
)
from precompute.images.rejected import Rejected


def nearest_aspect(table: Aspects, aspect: float) -> Sides:
    """The first of equals wins."""
    return min(table, key=lambda entry: abs(entry[0] - aspect))[1]


def refuse_empty(size: Sides, bucket: Sides, step: int) -> None:
    """Raise Rejected for a bucket without pixels, which the projects' own code cannot handle either."""
    if min(bucket) < 1:
        raise Rejected("too small", f"{size[0]} x {size[1]} pixels leave no side of {step}")


@lru_cache
def sd_scripts_sizes(rule: SizeRule) -> Aspects:
    square = int(sqrt(area_of(rule)) // rule.step) * rule.step
    return with_aspects(sorted({(square, square)} | grid_sizes(rule)))


def place_sd_scripts(rule: SizeRule, size: Sides) -> Placement:
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
    side, sizes = rule.resolution, grid_sizes(rule)
    if side in range(rule.min, rule.max + 1, rule.step) and side**2 <= rule.pixels:
        sizes.add((side, side))
    return with_aspects(sorted(sizes, key=lambda size: (size[0], -size[1])))


def place_novelai(rule: SizeRule, size: Sides) -> Placement:
    aspect, most = size[0] / size[1], rule.max_aspect_error
    assert most, "its default is filled in"
    nearest, bucket = min(novelai_sizes(rule), key=lambda entry: abs(log(entry[0]) - log(aspect)))
    if abs(nearest - aspect) >= most:
        far = f"aspect {aspect:.3g} differs from {nearest:.3g}, its bucket's, by {most:g} or more"
        raise Rejected("too wide", far)
    return cover(size, bucket)


NEMO_ASPECTS = (
    *((1, 2), (9, 16), (2, 3), (3, 4), (4, 5), (1, 1), (5, 4), (4, 3)),
    *((3, 2), (16, 10), (5, 3), (16, 9), (2, 1), (21, 9)),
)

ONE_TRAINER_ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)


@lru_cache
def nemo_sizes(rule: SizeRule) -> Aspects:
    step, sizes = rule.step, set[Sides]()
    for aspect in (across / down for across, down in NEMO_ASPECTS):
        height = round(int(sqrt(area_of(rule) / aspect)) / step) * step
        width = round(int(height * aspect) / step) * step
        while width * height > area_of(rule):
            width, height = (width - step, height) if width >= height else (width, height - step)
        if min(width, height) >= step:
            sizes.add((width, height))
    return sorted(with_aspects(sizes))


def place_nemo(rule: SizeRule, size: Sides) -> Placement:
    """Choose the first of the nearest aspects. Truncation may leave a side one pixel short; the crop then begins at -1,
    and the missing pixels are black.
    """
    bucket = nearest_aspect(nemo_sizes(rule), size[0] / size[1])
    return keep_middle(bucket, scale_by(size, covering_scale(size, bucket), int))


@lru_cache
def one_trainer_sizes(rule: SizeRule) -> Aspects:
    """List sizes in the order of a Python set of (height, width): hashes of numbers are the same in every process."""
    resolution, step = rule.resolution, rule.step
    wide = [(1.0 / sqrt(aspect) * resolution, aspect / sqrt(aspect) * resolution) for aspect in ONE_TRAINER_ASPECTS]
    sides = wide + [(width, height) for height, width in wide]
    sizes = [(round(height / step) * step, round(width / step) * step) for height, width in sides]
    return [(height / width, (width, height)) for height, width in list(set(sizes)) if width]


def place_one_trainer(rule: SizeRule, size: Sides) -> Placement:
    width, height = size
    bucket = nearest_aspect(one_trainer_sizes(rule), height / width)
    if height / width > bucket[1] / bucket[0]:
        resized = (bucket[0], round(height * (bucket[0] / width)))
    else:
        resized = (round(width * (bucket[1] / height)), bucket[1])
    return keep_middle(bucket, resized)


@lru_cache
def diffusion_pipe_sizes(rule: SizeRule) -> Aspects:
    """List each size after the logarithm of its aspect, which is rounded to three decimals."""
    assert rule.min_aspect, "its defaults are filled in"
    assert rule.max_aspect, "its defaults are filled in"
    sizes = []
    for aspect in np.unique(np.geomspace(rule.min_aspect, rule.max_aspect, rule.num_aspects).round(3)).tolist():
        side = sqrt(rule.resolution**2 * aspect)
        width, height = (round(each / rule.step) * rule.step for each in (side, rule.resolution**2 / side))
        sizes.append((log(aspect), (width, height)))
    return sizes


def place_diffusion_pipe(rule: SizeRule, size: Sides) -> Placement:
    return cut_first(size, nearest_aspect(diffusion_pipe_sizes(rule), log(size[0] / size[1])))


DIFFUSERS_ASPECTS = ((1, 1), (4, 5), (5, 4), (2, 3), (3, 2), (3, 4), (4, 3), (9, 16), (16, 9), (1, 2), (2, 1))


@lru_cache(maxsize=4_096)
def diffusers_ladder(resolution: int, step: int) -> Sequence[Sides]:
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
    step, budget, own = rule.step, rule.resolution**2, size[0] * size[1]
    target = min(own, budget)
    scale = sqrt(target / own)
    across, down = size[0] * scale / step, size[1] * scale / step
    pairs = [(wide(across) * step, tall(down) * step) for wide in (floor, ceil) for tall in (floor, ceil)]
    fitting = [each for each in pairs if min(each) > 0 and each[0] * each[1] <= budget]
    lowest = max(step, floor(across) * step), max(step, floor(down) * step)
    bucket = min(fitting, key=lambda each: abs(each[0] * each[1] - target), default=lowest)
    return keep_middle(bucket, scale_by(size, covering_scale(size, bucket), ceil))
