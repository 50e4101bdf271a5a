"""Vision towers of fixed size that transformers runs: SigLIP, CLIP, DINO and others; nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, Family, PixelRange, refuse_other_side
from precompute.encoders.model_files import ModelFiles, Place
from precompute.encoders.preprocessing import refuse_other_range

WITHIN = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
"""Names of a tower's weights in a multimodal language model begin so, by the version of transformers that saved it."""

SIDE = 224
"""transformers' default `image_size` of most towers, which config.json leaves out where it is that."""


SIGLIP = ("siglip_vision_model",)
CLIP = ("clip_vision_model",)

PLACES = {
    "SiglipVisionModel": Place(kinds=SIGLIP, prefixes=("vision_model.", "")),
    "SiglipModel": Place(kinds=SIGLIP, prefixes=("vision_model.",), is_part=True),
    "Gemma3ForConditionalGeneration": Place(kinds=SIGLIP, prefixes=WITHIN, is_part=True),
    "PaliGemmaForConditionalGeneration": Place(kinds=SIGLIP, prefixes=WITHIN, is_part=True),
    "CLIPVisionModel": Place(kinds=CLIP, prefixes=("vision_model.", "")),
    "CLIPVisionModelWithProjection": Place(kinds=CLIP, prefixes=("vision_model.",)),
    "CLIPModel": Place(kinds=CLIP, prefixes=("vision_model.",), is_part=True),
    "LlavaForConditionalGeneration": Place(kinds=(*CLIP, *SIGLIP), prefixes=WITHIN, is_part=True),
    "Dinov2Model": Place(kinds=("dinov2",)),
    "Dinov2WithRegistersModel": Place(kinds=("dinov2_with_registers",)),
    "DINOv3ViTModel": Place(kinds=("dinov3_vit",)),
}
"""By class. Of SigLIP the head that pools an image to one vector is left out: the last hidden state comes before it."""


def place_of(class_name: str) -> Place:
    """Return the class's place; any other class must itself map pixels to tokens."""
    return PLACES.get(class_name, Place())


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.tower import TowerEncoder, load_tower

    refuse_other_range(files.model, pixel_range)
    return TowerEncoder(load_tower(files, place_of(files.class_name), config), config, pixel_range)


def refuse_size(config: Mapping[str, Any], height: int, width: int) -> None:
    (class_name,) = config["architectures"]
    side = place_of(class_name).tower_values(config).get("image_size", SIDE)
    refuse_other_side(height, width, side if isinstance(side, int) else side[0])


FAMILY = Family(load=load, refuse_size=refuse_size, takes=("pool", "layer", "class_token"))
