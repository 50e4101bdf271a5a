"""The `image:` section of a build's config; it imports no decoder."""

import re
from dataclasses import dataclass, field
from typing import Literal

from cache_store.errors import ConfigError
from cache_store.format.array import MAX_COUNT, MAX_SIDE, ImageRecipe, SizeRule
from precompute.images.buckets import BucketsConfig

OF_MODEL = ("height", "width", "fit", "resample", "range")
"""Fields that `from_model` sets."""

FIXED_SIZE = ("height", "width", "fit", "from_model")
"""Fields for images of one size."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The steps from an image to pixels; every field changes the latents, so changing one means a new cache."""

    height: int = 224
    """Pixels; a multiple of a VAE's spatial factor (8 for Cosmos), or a vision tower's own size."""
    width: int = 224
    """Pixels; a multiple of the same factor as the height."""
    fit: str = "squash"
    """squash: scale both sides, ignoring the aspect; crop: fill, keep the middle; pad: fit, add a grey border; edge N:
    scale the shorter side to N, keep the middle, as processors of CLIP and DINO do.
    """
    resample: Literal["bilinear", "bicubic", "lanczos", "box"] = "bilinear"
    """Pillow's filter of that name; all average when they shrink."""
    range: Literal["signed", "theworld", "clip", "imagenet", "unit"] = "signed"
    """Range of RGB at the encoder's input. signed: [-1, 1], as VAEs and SigLIP expect; clip, imagenet: standardised for
    vision towers as CLIP and DINO do; unit: [0, 1]; theworld: [0, 255], for a VAE.
    """
    max_pixels: int = 100_000_000
    """Larger images are rejected from their header, before decoding; 100 million take up to 3.2 GB to decode."""
    decode: Literal["full", "reduced"] = "full"
    """reduced: decode large JPEGs at 1/2, 1/4 or 1/8 of their size, but at least at twice the fitted size; faster, with
    nearly the same pixels.
    """
    flip: bool = False
    """Mirror left and right after fitting: a second view of the same samples, to store in a separate cache."""

    from_model: bool = False
    """Take height, width, fit, resample and range from a vision tower's preprocessor_config.json."""

    buckets: BucketsConfig = field(default_factory=BucketsConfig)

    def __post_init__(self) -> None:
        if self.has_buckets and (given := [name for name in FIXED_SIZE if self._is_given(name)]):
            raise ConfigError(f"image.{given[0]} and image.buckets contradict each other; leave one of them out")
        if (fit := FIT.fullmatch(self.fit)) is None:
            raise ConfigError(f"image.fit must be one of squash, crop, pad, or edge N, got {self.fit}")
        if fit["edge"] and int(fit["edge"]) < max(self.height, self.width):
            raise ConfigError(
                f"image.fit: {self.fit} leaves too little for {self.height}x{self.width}; the shorter side must be at "
                f"least {max(self.height, self.width)}"
            )
        if self.from_model and any(map(self._is_given, OF_MODEL)):
            raise ConfigError("image.from_model says height, width, fit, resample and range; leave them out")
        for name, most in (("height", MAX_SIDE), ("width", MAX_SIDE), ("max_pixels", MAX_COUNT)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"image.{name} must be in [1, {most:,}], got {value:,}")

    def _is_given(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(type(self), name))

    @property
    def has_buckets(self) -> bool:
        return self.buckets.preset != "none"

    @property
    def rule(self) -> SizeRule:
        assert not self.from_model, "BuildConfig.prepared says what the model does"
        if self.has_buckets:
            return self.buckets.rule
        name, _, edge = self.fit.partition(" ")
        return SizeRule(preset=name, resolution=int(edge or 0), sizes=((self.width, self.height),))

    @property
    def recipe(self) -> ImageRecipe:
        return ImageRecipe(rule=self.rule, **{name: getattr(self, name) for name in RECIPE_FIELDS})


RECIPE_FIELDS = ("resample", "range", "max_pixels", "decode", "flip")
"""Fields that an image's recipe has as they are in the config."""

FIT = re.compile(r"squash|crop|pad|edge (?P<edge>[1-9][0-9]{0,4})")
