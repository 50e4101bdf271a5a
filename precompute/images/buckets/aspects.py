"""Rules whose sizes follow from a list of aspects: NeMo Automodel, OneTrainer and diffusion-pipe.

Their arithmetic is kept, floats and the order of equals included.
"""

from functools import lru_cache
from math import log, sqrt

import numpy as np

from cache_store.format.array import SizeRule
from precompute.images.buckets.placement import (
    Aspects,
    Placement,
    Sides,
    area_of,
    covering_scale,
    cut_first,
    keep_middle,
    scale_by,
    with_aspects,
)

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
    aspect = size[0] / size[1]
    _, bucket = min(nemo_sizes(rule), key=lambda entry: abs(entry[0] - aspect))
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
    """Choose the nearest height over width; the first of equals, in the set's order, wins."""
    (width, height), aspect = size, size[1] / size[0]
    nearest, bucket = min(one_trainer_sizes(rule), key=lambda entry: abs(entry[0] - aspect))
    if aspect > nearest:
        resized = (bucket[0], round(height * (bucket[0] / width)))
    else:
        resized = (round(width * (bucket[1] / height)), bucket[1])
    return keep_middle(bucket, resized)


@lru_cache
def diffusion_pipe_sizes(rule: SizeRule) -> Aspects:
    """List each size after the logarithm of its aspect, which is rounded to three decimals."""
    least, most = rule.min_aspect, rule.max_aspect
    assert least, "its defaults are filled in"
    assert most, "its defaults are filled in"
    aspects = np.unique(np.geomspace(least, most, rule.num_aspects).round(3)).tolist()
    return [(log(aspect), diffusion_pipe_size(rule, aspect)) for aspect in aspects]


def diffusion_pipe_size(rule: SizeRule, aspect: float) -> Sides:
    width = sqrt(rule.resolution**2 * aspect)
    width, height = (round(side / rule.step) * rule.step for side in (width, rule.resolution**2 / width))
    return width, height


def place_diffusion_pipe(rule: SizeRule, size: Sides) -> Placement:
    """Choose the nearest aspect, by the logarithm; cut a fractional box of it, and scale that to the bucket."""
    aspect = log(size[0] / size[1])
    _, bucket = min(diffusion_pipe_sizes(rule), key=lambda entry: abs(entry[0] - aspect))
    return cut_first(size, bucket)
