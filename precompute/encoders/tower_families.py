"""Vision towers of fixed size that transformers runs: SigLIP, CLIP, DINO and others. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from cache_store.format.array import ImageRecipe
from precompute.encoders.encoder import Encoder, Family, range_of_images, refuse_other_size
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, TowerLocation
from precompute.encoders.preprocessing import refuse_other_range

WITHIN = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
"""Prefixes of a tower's weights in a multimodal model; they depend on the transformers version that saved it."""

SIDE = 224
"""Transformers' default `image_size` of most towers; config.json omits a default."""


SIGLIP = ("siglip_vision_model",)
CLIP = ("clip_vision_model",)

LOCATIONS = {
    "SiglipVisionModel": TowerLocation(kinds=SIGLIP, prefixes=("vision_model.", "")),
    "SiglipModel": TowerLocation(kinds=SIGLIP, prefixes=("vision_model.",), is_part=True),
    "Gemma3ForConditionalGeneration": TowerLocation(kinds=SIGLIP, prefixes=WITHIN, is_part=True),
    "PaliGemmaForConditionalGeneration": TowerLocation(kinds=SIGLIP, prefixes=WITHIN, is_part=True),
    "CLIPVisionModel": TowerLocation(kinds=CLIP, prefixes=("vision_model.", "")),
    "CLIPVisionModelWithProjection": TowerLocation(kinds=CLIP, prefixes=("vision_model.",)),
    "CLIPModel": TowerLocation(kinds=CLIP, prefixes=("vision_model.",), is_part=True),
    "LlavaForConditionalGeneration": TowerLocation(kinds=(*CLIP, *SIGLIP), prefixes=WITHIN, is_part=True),
    "Dinov2Model": TowerLocation(kinds=("dinov2",)),
    "Dinov2WithRegistersModel": TowerLocation(kinds=("dinov2_with_registers",)),
    "DINOv3ViTModel": TowerLocation(kinds=("dinov3_vit",)),
}
"""Where each class keeps its tower. SigLIP's pooling head is left out: it comes after the last hidden state."""


def location_of(class_name: str) -> TowerLocation:
    """Return the class's location; a class that is not listed must itself map pixels to tokens."""
    return LOCATIONS.get(class_name, TowerLocation())


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.tower import TowerEncoder, load_tower

    pixel_range = range_of_images(image)
    refuse_other_range(files.model, pixel_range)
    return TowerEncoder(load_tower(files, location_of(files.class_name), config), config, pixel_range)


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    (class_name,) = config["architectures"]
    side = location_of(class_name).tower_values(config).get("image_size", SIDE)
    refuse_other_size(height, width, side if isinstance(side, int) else side[0])


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("pool", "layer", "class_token"))
