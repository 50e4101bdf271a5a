"""The vision tower of Qwen2.5-VL, at a fixed size that `image:` says: the tokens of its merger."""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family, refuse_unfit
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.preprocessing import refuse_other_range

PATCH, MERGED = 14, 2
"""transformers' defaults of `patch_size` and `spatial_merge_size`."""


def side_of_token(config: Mapping[str, Any]) -> int:
    """Pixels of a side of what one token stands for."""
    vision = config["vision_config"]
    side: int = vision.get("patch_size", PATCH) * vision.get("spatial_merge_size", MERGED)
    return side


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    refuse_unfit(height, width, side_of_token(config))


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.towers.qwen_tower import QwenEncoder

    refuse_other_range(files.model, pixel_range)
    return QwenEncoder(files, config, pixel_range, side_of_token(files.config))


FAMILY = Family(load=load, refuse_size=refuse_size)
