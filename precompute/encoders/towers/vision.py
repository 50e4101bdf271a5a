"""The family of vision towers that transformers runs; torch and transformers are imported when one is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family, refuse_other_side
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.preprocessing import refuse_other_range
from precompute.encoders.towers.place import SIDE, Place


def vision_family(place_of: Callable[[str], Place]) -> Family:
    """The family whose checkpoints keep towers where `place_of` says of their class."""

    def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        from precompute.encoders.towers.tower import TowerEncoder
        from precompute.encoders.towers.transformers_tower import load_tower

        refuse_other_range(files.model, pixel_range)
        return TowerEncoder(load_tower(files, place_of(files.class_name), config), config, pixel_range)

    def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
        (class_name,) = config["architectures"]
        side = place_of(class_name).tower_values(config).get("image_size", SIDE)
        refuse_other_side(height, width, side if isinstance(side, int) else side[0])

    return Family(load=load, refuse_size=refuse_size, takes=("pool", "layer", "class_token"))
