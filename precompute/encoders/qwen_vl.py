"""The vision towers of Qwen-VL, at the fixed size in `image:`: the tokens of the merger, or of a deepstack level.

Qwen3-VL's language model takes the merger's tokens as others do, and adds those of its deepstack levels to the output
of its first layers; each level is a cache of its own.
"""

from collections.abc import Mapping
from typing import Any

from cache_store.format.array import ImageRecipe
from precompute.encoders.encoder import Encoder, Family, range_of_images, refuse_cropping
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, TowerLocation
from precompute.encoders.preprocessing import refuse_other_range

MERGED = 2
"""Transformers' default of `spatial_merge_size`."""

PATCHES = {
    "Qwen2VLForConditionalGeneration": 14,
    "Qwen2_5_VLForConditionalGeneration": 14,
    "Qwen3VLForConditionalGeneration": 16,
    "Qwen3VLMoeForConditionalGeneration": 16,
}
"""Transformers' defaults of `patch_size`, by class."""

MODEL_TYPES = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_vision",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_vision",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_vision",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_vision",
}
"""Model type of each class's tower."""


def location_of(class_name: str) -> TowerLocation:
    return TowerLocation(kinds=(MODEL_TYPES[class_name],), prefixes=("model.visual.", "visual."), is_part=True)


def side_of_token(class_name: str, config: Mapping[str, Any]) -> int:
    """Return the side, in pixels, of the square that becomes one token."""
    vision = config["vision_config"]
    side: int = vision.get("patch_size", PATCHES[class_name]) * vision.get("spatial_merge_size", MERGED)
    return side


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    (class_name,) = config["architectures"]
    refuse_cropping(height, width, side_of_token(class_name, config))


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.qwen_tower import QwenEncoder

    pixel_range = range_of_images(image)
    refuse_other_range(files.model, pixel_range)
    side = side_of_token(files.class_name, files.config)
    return QwenEncoder(files, location_of(files.class_name), config, pixel_range, side)


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("layer",))
