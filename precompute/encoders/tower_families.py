"""Vision towers that transformers runs, at a fixed size: SigLIP, CLIP, DINO, Qwen-VL and others. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.format.array import ImageRecipe
from precompute.encoders.encoder import (
    Encoder,
    Family,
    TowerLocation,
    range_of_images,
    refuse_cropping,
    refuse_other_size,
)
from precompute.encoders.encoder_config import EncoderConfig

if TYPE_CHECKING:
    from precompute.encoders.model_files import ModelFiles


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


QWEN = {
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_vision", 14),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_vision", 14),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_vision", 16),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_vision", 16),
}
"""Model type of each class's tower, and transformers' default of its `patch_size`."""

MERGED = 2


def location_of(class_name: str) -> TowerLocation:
    """Return the class's location; a class that is not listed must itself map pixels to tokens."""
    if class_name in QWEN:
        return TowerLocation(kinds=QWEN[class_name][:1], prefixes=("model.visual.", "visual."), is_part=True)
    return LOCATIONS.get(class_name, TowerLocation())


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    pixel_range, location = range_of_images(image), location_of(files.class_name)
    from precompute.encoders.preprocessing import refuse_other_range

    refuse_other_range(files.model, pixel_range)
    if pixel_range == "theworld":
        raise ConfigError(f"image.range: theworld is for VAEs; a {files.class_name} needs clip or signed")
    if files.class_name in QWEN:
        from precompute.encoders.qwen_tower import QwenEncoder

        return QwenEncoder(files, location, config, pixel_range)
    from precompute.encoders.tower import TowerEncoder

    return TowerEncoder(files, location, config, pixel_range)


def refuse_size(files: ModelFiles, height: int, width: int) -> None:
    held = location_of(files.class_name).tower_values(files.config)
    if files.class_name in QWEN:
        patch = held.get("patch_size", QWEN[files.class_name][1])
        refuse_cropping(height, width, patch * held.get("spatial_merge_size", MERGED))
    else:
        side = held.get("image_size", SIDE)
        refuse_other_size(height, width, side if isinstance(side, int) else side[0])


def family_of(class_name: str) -> Family:
    takes = ("layer",) if class_name in QWEN else ("pool", "layer", "class_token")
    return Family(load=load, refuse_size=refuse_size, takes=takes)
