"""The image recipe of a vision tower's own processor, from its preprocessor_config.json, as values of `image:`.

Transformers' processors that squash an image with Pillow, or scale its shorter side and crop the middle, are reproduced
pixel by pixel. Any other one is refused with its values, for the user to choose.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError, MissingPathError
from precompute.encoders.encoder import COLOUR_STATISTICS, PixelRange
from precompute.encoders.model_files import find_model, local_file, model_file

Values = dict[str, Any]

PILLOW_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
"""Filters by Pillow's number."""

RANGES = {**COLOUR_STATISTICS, "signed": ((0.5,) * 3, (0.5,) * 3)}

BY_SHORTER_SIDE = ("CLIPImageProcessor", "CLIPFeatureExtractor", "BitImageProcessor")
"""Processors for which a bare number is the size of the shorter side; for others, of both sides."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

NOT_PILLOW = ("DINOv3ViTImageProcessor",)


def recipe_of_model(model: str) -> Values:
    """Return values of `image:` from the model's processor; ConfigError if it cannot be followed."""
    if not (path := model_file(find_model(model).model, *PROCESSOR_FILES)):
        raise MissingPathError(f"image.from_model: {model} has no preprocessor_config.json; leave it out and choose")
    held = read_processor(path)
    kind = str(held.get("image_processor_type") or held.get("feature_extractor_type") or "")
    try:
        if kind.startswith(NOT_PILLOW) or held.get("crop_pct") or held.get("do_pad") or held.get("do_resize") is False:
            raise ValueError("it does not only resize and crop, with Pillow")
        return {**size_and_fit(held, kind), "resample": PILLOW_FILTERS[held["resample"]], "range": range_of(held)}
    except (KeyError, TypeError, ValueError) as error:
        chosen = {name: held.get(name) for name in ("size", "crop_size", "resample", "image_mean", "image_std")}
        raise ConfigError(
            f"image.from_model: the {kind or 'processor'} of {model} cannot be followed ({error}); leave it out and "
            f"choose image.height, width, fit, resample and range for {json.dumps(chosen)}"
        ) from None


def refuse_other_range(model: str, pixel_range: PixelRange) -> None:
    """Raise ConfigError if the tower's own processor gives it pixels in another range."""
    if (path := local_file(model, *PROCESSOR_FILES)) is None:
        return  # without a download, which every worker would make
    try:
        stated = range_of(read_processor(path))
    except (KeyError, TypeError, ValueError):
        return  # the range is none that we know
    if stated != pixel_range:
        raise ConfigError(
            f"image.range is {pixel_range}, but the processor of {model} gives it {stated}; set image.range: {stated}, "
            "or image.from_model: true"
        )


def read_processor(path: Path) -> Values:
    values = json.loads(path.read_text(encoding="utf-8"))
    return dict(values.get("image_processor", values))


def size_and_fit(held: Values, kind: str) -> Values:
    size, crop = held["size"], held.get("crop_size") if held.get("do_center_crop") else None
    if isinstance(size, int):
        size = {"shortest_edge": size} if kind.startswith(BY_SHORTER_SIDE) else {"height": size, "width": size}
    if set(size) == {"height", "width"} and crop is None:
        return {**size, "fit": "squash"}
    cut = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if set(size) == {"shortest_edge"} and cut and max(cut.values()) <= size["shortest_edge"]:
        return {"height": cut["height"], "width": cut["width"], "fit": f"edge {size['shortest_edge']}"}
    raise ValueError("its size is neither fixed nor that of the shorter side with a cut after it")


def range_of(held: Mapping[str, Any]) -> str:
    if abs(held.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6 or held.get("do_rescale") is False:
        raise ValueError("it does not scale by 1/255")
    if held.get("do_normalize") is False:
        return "unit"
    wanted = tuple(held["image_mean"]), tuple(held["image_std"])
    for name, statistics in RANGES.items():
        if statistics == wanted:
            return name
    raise ValueError("its mean and deviation are neither CLIP's nor ImageNet's nor 0.5")
