"""Every rule gives an image the place that its project gives it, and the properties that the page of rules promises."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cache_store.errors import ConfigError
from cache_store.format.array import SizeRule
from precompute.images.buckets import PRESETS, BucketsConfig, place
from precompute.images.placement import Sides, area_of
from precompute.images.rejected import Rejected

EXAMPLES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "bucket_examples.json").read_text())["rules"]

CONFIGS = {
    **{each["name"]: BucketsConfig(**each["buckets"]) for each in EXAMPLES},
    "ours": BucketsConfig(preset="ours"),
    "ours, 512": BucketsConfig(preset="ours", resolution=512, step=16),
    "ours, no_upscale": BucketsConfig(preset="ours", no_upscale=True),
    "ours, pixels": BucketsConfig(preset="ours", pixels=960 * 544, min=256, max=1024),
    "ours, sizes": BucketsConfig(preset="ours", sizes=["512x512", "768x512", "512x768", "1024x1024"]),
}


def bucket_of(rule: SizeRule, size: Sides) -> Sides:
    _, height, width = place(rule, size).bucket
    return width, height


def random_sizes(count: int) -> list[Sides]:
    random = np.random.default_rng(0)
    sides = np.exp(random.uniform(np.log(150), np.log(6_000), count))
    aspects = np.exp(random.uniform(-np.log(4), np.log(4), count))
    sizes = [(int(side), int(side * aspect)) for side, aspect in zip(sides, aspects, strict=True)]
    return [size for size in sizes if min(size) > 80]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["name"])
def test_a_rule_places_images_as_its_project_does(example):
    rule = BucketsConfig(**example["buckets"]).rule
    for size, bucket, *scaled in example["places"]:
        found = place(rule, tuple(size))
        assert [found.bucket.width, found.bucket.height] == bucket
        for name, expected in zip(("resized", "crop", "seen"), scaled, strict=False):
            assert expected is None or getattr(found, name) == tuple(expected)
    if order := example.get("order"):
        assert [list(size) for _, size in PRESETS[rule.preset].table(rule)] == order


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bucket_of_a_rule_as_recorded_is_listed_and_the_scaled_image_covers_it(config):
    rule = msgspec.json.decode(msgspec.json.encode(config.rule), type=SizeRule)
    assert rule == config.rule
    table = PRESETS[rule.preset].table
    listed = {size for _, size in table(rule)} if table and not rule.no_upscale else None
    has_budget = rule.preset not in ("one-trainer", "diffusion-pipe", "diffusers") and not rule.sizes
    short = 1 if rule.preset == "nemo" else 0
    for size in random_sizes(400):
        found = place(rule, size)
        bucket = (found.bucket.width, found.bucket.height)
        assert listed is None or bucket in listed
        assert not rule.step or [side % rule.step for side in bucket] == [0, 0]
        assert not has_budget or bucket[0] * bucket[1] <= area_of(rule)
        assert not rule.no_upscale or min(np.subtract(size, found.resized)) >= 0
        for side, scaled, start in zip(bucket, found.resized, found.crop, strict=True):
            assert -short <= start
            assert start + side <= scaled + short


# The rule `ours`.


@pytest.mark.parametrize("name", ["ours", "ours, 512", "ours, pixels", "ours, sizes"])
def test_ours_chooses_the_nearest_aspect_and_mirrors_its_buckets_with_the_image(name):
    """Compared in exact fractions with every bucket."""
    rule = CONFIGS[name].rule
    buckets = [size for _, size in PRESETS["ours"].table(rule)]
    for size in random_sizes(200):
        one, other = place(rule, size), place(rule, size[::-1])
        bucket = 1, other.bucket.width, other.bucket.height
        assert size[0] == size[1] or one == (bucket, other.resized[::-1], other.crop[::-1], None)
        chosen = bucket_of(rule, size)
        quotients = {each: Fraction(each[0] * size[1], each[1] * size[0]) for each in buckets}
        distances = {each: max(quotient, 1 / quotient) for each, quotient in quotients.items()}
        assert distances[chosen] == min(distances.values())


def test_without_upscaling_a_small_image_gets_the_largest_grid_size_inside_it():
    rule = CONFIGS["ours, no_upscale"].rule
    for size, bucket, resized in (((500, 333), (448, 320), (480, 320)), ((4_000, 200), (2048, 192), (3_840, 192))):
        assert (bucket_of(rule, size), place(rule, size).resized) == (bucket, resized)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"preset": "none", "resolution": 512}, "resolution"),
        ({"preset": "sd-scripts", "sizes": ["64x64"]}, "sizes"),
        ({"preset": "ours", "sizes": ["64x64"], "step": 8}, "step"),
        ({"preset": "ours", "sizes": ["1024"]}, "1024"),
        ({"preset": "ours", "resolution": 512, "pixels": 512 * 512}, "pixels"),
        ({"preset": "sd-scripts", "min": 512, "max": 256}, "min"),
        ({"preset": "diffusion-pipe", "max_aspect": 5000.0}, "without pixels"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_together_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        BucketsConfig(**fields)


def test_an_image_that_has_no_bucket_is_rejected_with_a_reason():
    with pytest.raises(Rejected, match="too small: 60 x 500"):
        place(CONFIGS["ours, no_upscale"].rule, (60, 500))
    with pytest.raises(Rejected, match="aspect 8 differs"):
        place(BucketsConfig(preset="novelai").rule, (800, 100))
