"""SigLIP's vision tower, by itself, beside its text tower or within Gemma 3."""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family, refuse_other_side
from precompute.encoders.model_files import ModelFiles

SIDE = 224
"""transformers' default `image_size`, which config.json leaves out where it is that."""


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    refuse_other_side(height, width, int(config.get("vision_config", config).get("image_size", SIDE)))


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.towers.siglip_tower import load_siglip
    from precompute.encoders.towers.tower import TowerEncoder

    return TowerEncoder(load_siglip(files, config), config, pixel_range)


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("pool",))
