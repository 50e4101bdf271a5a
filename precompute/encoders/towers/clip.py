"""CLIP's vision tower, by itself, beside its text tower, or within LLaVA, which takes its second to last layer."""

from precompute.encoders.towers.place import WITHIN, Place
from precompute.encoders.towers.vision import vision_family

KIND = ("clip_vision_model",)
PLACES = {
    "CLIPVisionModel": Place(kinds=KIND, prefixes=("vision_model.", "")),
    "CLIPVisionModelWithProjection": Place(kinds=KIND, prefixes=("vision_model.",)),
    "CLIPModel": Place(kinds=KIND, prefixes=("vision_model.",), is_part=True),
    "LlavaForConditionalGeneration": Place(kinds=(*KIND, "siglip_vision_model"), prefixes=WITHIN, is_part=True),
}

FAMILY = vision_family(PLACES.__getitem__)
