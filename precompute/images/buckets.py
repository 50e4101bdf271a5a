"""Buckets: the sizes of a cache of images of many aspects, and the rules that give each image one of them.

docs/reference/buckets.md states each rule; bucket_examples.json of the tests names the commit that it follows.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import isqrt
from typing import Any

from cache_store.errors import ConfigError
from cache_store.format.array import MAX_SIDE, Size, SizeRule
from precompute.images import project_rules as projects
from precompute.images.placement import (
    Aspects,
    Placement,
    Sides,
    area_of,
    place_crop,
    place_edge,
    place_ours,
    place_pad,
    place_squash,
    sizes_within,
    with_bounds,
)

__all__ = ["BucketsConfig", "Placement", "Sides", "place"]

SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A rule: the fields that it uses, with their defaults, and its function."""

    place: Callable[[SizeRule, Sides], Placement]
    defaults: Mapping[str, Any]
    also: Collection[str] = ()
    """Fields that it uses without a default of their own."""
    complete: Callable[[SizeRule], SizeRule] = lambda rule: rule
    """Fills in the defaults that depend on other fields."""
    table: Callable[[SizeRule], Aspects] | None = None
    """Lists its buckets; None if they depend on the image."""


PRESETS = {
    "ours": Preset(
        place=place_ours,
        defaults={"resolution": 1024, "step": 64},
        also=("pixels", "min", "max", "no_upscale", "sizes"),
        complete=with_bounds,
        table=sizes_within,
    ),
    "diffusers": Preset(place=projects.place_diffusers, defaults={"resolution": 512, "step": 16}, also=("sizes",)),
    "sd-scripts": Preset(
        place=projects.place_sd_scripts,
        defaults={"resolution": 1024, "min": 256, "max": 1024, "step": 64},
        also=("pixels", "no_upscale"),
        table=projects.sd_scripts_sizes,
    ),
    "musubi": Preset(
        place=projects.place_musubi,
        defaults={"pixels": 960 * 544, "step": 16},
        also=("resolution", "no_upscale"),
        table=projects.musubi_sizes,
    ),
    "one-trainer": Preset(
        place=projects.place_one_trainer, defaults={"resolution": 512, "step": 64}, table=projects.one_trainer_sizes
    ),
    "diffusion-pipe": Preset(
        place=projects.place_diffusion_pipe,
        defaults={"resolution": 512, "step": 32, "min_aspect": 0.5, "max_aspect": 2.0, "num_aspects": 7},
        table=projects.diffusion_pipe_sizes,
    ),
    "ai-toolkit": Preset(place=projects.place_ai_toolkit, defaults={"resolution": 512, "step": 64}),
    "nemo": Preset(
        place=projects.place_nemo, defaults={"resolution": 256, "step": 64}, also=("pixels",), table=projects.nemo_sizes
    ),
    "novelai": Preset(
        place=projects.place_novelai,
        defaults={"resolution": 512, "min": 256, "max": 1024, "step": 64, "max_aspect_error": 4.0},
        also=("pixels",),
        complete=projects.with_budget,
        table=projects.novelai_sizes,
    ),
}
"""Rules of buckets by name; to add one, write its function and add an entry."""

PLACES: dict[str, Callable[[SizeRule, Sides], Placement]] = {
    "squash": place_squash,
    "crop": place_crop,
    "pad": place_pad,
    "edge": place_edge,
    **{name: preset.place for name, preset in PRESETS.items()},
}

LISTED = ("resolution", "pixels", "min", "max", "step")
"""Fields that a list of sizes replaces."""


@dataclass(frozen=True, kw_only=True)
class BucketsConfig:
    """Images of many sizes: a rule gives each image one of several sizes, its bucket. A field that is left out has the
    rule's own default.
    """

    preset: str = "none"
    """none: all images get image.height and image.width. ours: the nearest aspect, among sizes within a number of
    pixels; the excess is cut evenly. diffusers, sd-scripts, musubi, one-trainer, diffusion-pipe, ai-toolkit, nemo,
    novelai: as those trainers do."""
    resolution: int | None = None
    """Side of the square that has a bucket's pixels."""
    pixels: int | None = None
    """Most pixels of a bucket, instead of a resolution: 522240 is 960 x 544."""
    min: int | None = None
    """Shortest side of a bucket."""
    max: int | None = None
    """Longest side of a bucket."""
    step: int | None = None
    """Sides are multiples of it; itself a multiple of the side of a latent cell, or of two where the VAE shows that."""
    no_upscale: bool = False
    """true: small images get small buckets instead of being enlarged. ours, sd-scripts, musubi."""
    sizes: list[str] | None = None
    """The buckets, width x height, instead of the fields above: [1024x1024, 1216x832]. ours, diffusers."""
    min_aspect: float | None = None
    """diffusion-pipe: width over height of the tallest bucket."""
    max_aspect: float | None = None
    """diffusion-pipe: width over height of the widest bucket."""
    num_aspects: int | None = None
    """diffusion-pipe: number of aspects."""
    max_aspect_error: float | None = None
    """novelai: an image whose aspect differs by this or more from the nearest bucket's is rejected."""

    def __post_init__(self) -> None:
        given = self._given
        if self.preset == "none":
            if given:
                raise ConfigError(f"image.buckets.{next(iter(given))} needs image.buckets.preset: a rule's name")
            return
        if (preset := PRESETS.get(self.preset)) is None:
            raise ConfigError(f"image.buckets.preset must be one of none, {', '.join(PRESETS)}, got {self.preset}")
        for name in given:
            if name not in preset.defaults and name not in preset.also:
                raise ConfigError(f"image.buckets.{name} has no effect for preset {self.preset}; leave it out")
        if self.sizes is not None:
            if others := [name for name in LISTED if name in given]:
                raise ConfigError(f"image.buckets.{others[0]} has no effect beside sizes; leave one of them out")
        elif {"resolution", "pixels"} <= given.keys() and self.preset != "novelai":
            raise ConfigError("give image.buckets.resolution or image.buckets.pixels, not both")
        for name, value in given.items():
            most = MAX_SIDE**2 if name == "pixels" else MAX_SIDE
            if name not in ("sizes", "no_upscale") and not 0 < value <= most:
                raise ConfigError(f"image.buckets.{name} must be above 0 and at most {most:,}, got {value}")
        if self.sizes is None:
            self._refuse_bad_grid(self.rule)
        for text in [] if self.sizes is None else self.sizes or [""]:
            if not (match := SIZE.fullmatch(text)) or max(map(int, match.groups())) > MAX_SIDE:
                raise ConfigError(f"image.buckets.sizes must be width x height, such as 1024x768; got {text}")

    def _refuse_bad_grid(self, rule: SizeRule) -> None:
        for name in ("min", "max"):
            if (side := getattr(rule, name)) % rule.step:
                raise ConfigError(f"image.buckets.{name} must be a multiple of step, {rule.step}; got {side}")
        square = isqrt(area_of(rule))
        if square < 2 * rule.step:  # the tables of smaller squares cannot be computed
            raise ConfigError(
                f"image.buckets: a square of {square} pixels a side is less than two steps of {rule.step}; set a "
                "larger resolution or a smaller step"
            )
        if (table := PRESETS[rule.preset].table) is None:
            return
        sizes = [size for _, size in table(rule)]
        if min((min(size) for size in sizes), default=0) < 1 or (len(sizes) == 1 and not rule.no_upscale):
            raise ConfigError(
                f"image.buckets: {rule.preset} has {len(sizes)} buckets of about {square} x {square} pixels, or some "
                "without pixels; set a larger resolution, or a smaller min or step"
            )

    @property
    def _given(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "preset"}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def rule(self) -> SizeRule:
        """The rule as a cache records it, with every number that it uses; only for a preset."""
        preset, given = PRESETS[self.preset], self._given
        values = {name: value for name, value in preset.defaults.items() if self.sizes is None or name not in LISTED}
        if given.keys() & {"resolution", "pixels"} and self.preset != "novelai":
            values = {name: value for name, value in values.items() if name not in ("resolution", "pixels")}
        if self.sizes is not None:
            given["sizes"] = tuple((int(width), int(height)) for width, height in (s.split("x") for s in self.sizes))
        return preset.complete(SizeRule(preset=self.preset, **{**values, **given}))


@lru_cache(2**14)
def place(rule: SizeRule, size: Sides) -> Placement:
    """Place an image of this size (width, height); raise Rejected if the rule leaves it out."""
    return PLACES[rule.preset](rule, size)


def placed_size(rule: SizeRule, own: Size) -> Size:
    """Return the size that a rule gives a file of this size; raise Rejected if the rule leaves it out."""
    return place(rule, (own.width, own.height)).bucket._replace(frames=own.frames)


def example_sizes(rule: SizeRule) -> Sequence[tuple[int, int]]:
    """Return heights and widths that a rule may give: all that are listed, or two that differ in every respect."""
    if rule.sizes:
        return [(height, width) for width, height in rule.sizes]
    return [(rows * rule.step, columns * rule.step) for rows, columns in ((9, 13), (17, 5))]


def most_pixels(rule: SizeRule) -> int:
    return max((width * height for width, height in rule.sizes), default=area_of(rule))
