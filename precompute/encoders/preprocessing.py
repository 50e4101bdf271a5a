"""How a vision tower's own checkpoint prepares images, by its preprocessor_config.json, as values of `image:`.

What transformers' processors do with Pillow is done here with the same pixels: squash to a size, or scale the shorter
side and cut the middle out. Whatever else one does is refused with what it says, for the user to choose.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache_store.errors import ConfigError, MissingPathError
from precompute.encoders.encoder import COLOUR_STATISTICS, PixelRange
from precompute.encoders.model_files import file_here, find_model, model_file

Values = dict[str, Any]

RESAMPLING = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
"""By Pillow's number."""

RANGES = {**COLOUR_STATISTICS, "signed": ((0.5,) * 3, (0.5,) * 3)}

BY_SHORTER_SIDE = ("CLIPImageProcessor", "CLIPFeatureExtractor", "BitImageProcessor")
"""Processors to which a size that is a bare number is that of the shorter side; to others, of both."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""The file of the image processor, or that of all processors."""

NOT_PILLOWS = ("DINOv3ViTImageProcessor",)
"""Processors that resize otherwise."""


def as_model_prepares(model: str) -> Values:
    """height, width, fit, resample and range of `image:` as the model's processor has them; ConfigError else."""
    held = processor_values(model)
    kind = str(held.get("image_processor_type") or held.get("feature_extractor_type") or "")
    try:
        if kind.startswith(NOT_PILLOWS) or held.get("crop_pct") or held.get("do_pad") or held.get("do_resize") is False:
            raise ValueError("it does not only resize and crop, with Pillow")
        return {**size_and_fit(held, kind), "resample": RESAMPLING[held["resample"]], "range": range_of(held)}
    except (KeyError, TypeError, ValueError) as error:
        chosen = {name: held.get(name) for name in ("size", "crop_size", "resample", "image_mean", "image_std")}
        raise ConfigError(
            f"image.from_model: the {kind or 'processor'} of {model} is none that is followed here ({error}); leave it "
            f"out and choose image.height, width, fit, resample and range for {json.dumps(chosen)}"
        ) from None


def refuse_other_range(model: str, pixel_range: PixelRange) -> None:
    """Raise ConfigError where pixels would enter a tower in another range than its own processor gives it."""
    if (path := file_here(model, *PROCESSORS)) is None:
        return  # the Hub is not asked for it by every worker
    try:
        stated = range_of(read_processor(path))
    except (KeyError, TypeError, ValueError):
        return  # it says nothing that is understood here
    if stated != pixel_range:
        raise ConfigError(
            f"image.range is {pixel_range}, but the processor of {model} gives it {stated}; set image.range: {stated}, "
            "or image.from_model: true"
        )


def processor_values(model: str) -> Values:
    """Read the config of the checkpoint's image processor, from a file of that or of all its processors."""
    if path := model_file(find_model(model).model, *PROCESSORS):
        return read_processor(path)
    raise MissingPathError(f"image.from_model: {model} has no preprocessor_config.json; leave it out and choose")


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
