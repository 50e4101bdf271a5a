"""The vision towers of Qwen-VL, at a fixed size that `image:` says: the tokens of the merger, or of a deepstack level.

Qwen3-VL's language model takes the merger's tokens as others do, and adds those of its deepstack levels to what its
first layers make of them; each level is a cache of its own.
"""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, Family, PixelRange, refuse_unfit
from precompute.encoders.model_files import ModelFiles, Place
from precompute.encoders.preprocessing import refuse_other_range

MERGED = 2
"""transformers' default of `spatial_merge_size`."""

PATCHES = {
    "Qwen2VLForConditionalGeneration": 14,
    "Qwen2_5_VLForConditionalGeneration": 14,
    "Qwen3VLForConditionalGeneration": 16,
    "Qwen3VLMoeForConditionalGeneration": 16,
}
"""transformers' defaults of `patch_size`, by class."""

KINDS = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_vision",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_vision",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_vision",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_vision",
}
"""The model type of each class' tower."""


def place_of(class_name: str) -> Place:
    return Place(kinds=(KINDS[class_name],), prefixes=("model.visual.", "visual."), is_part=True)


def side_of_token(class_name: str, config: Mapping[str, Any]) -> int:
    """Pixels of a side of what one token stands for."""
    vision = config["vision_config"]
    side: int = vision.get("patch_size", PATCHES[class_name]) * vision.get("spatial_merge_size", MERGED)
    return side


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    (class_name,) = config["architectures"]
    refuse_unfit(height, width, side_of_token(class_name, config))


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.qwen_tower import QwenEncoder

    refuse_other_range(files.model, pixel_range)
    side = side_of_token(files.class_name, files.config)
    return QwenEncoder(files, place_of(files.class_name), config, pixel_range, side)


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("layer",))
