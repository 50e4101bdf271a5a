"""SigLIP's vision tower, by itself, beside its text tower, or within Gemma 3 or PaliGemma; SigLIP 2 of fixed size too.

The head that makes one vector of an image is left out, as the last hidden state comes before it.
"""

from precompute.encoders.towers.place import WITHIN, Place
from precompute.encoders.towers.vision import vision_family

KIND = ("siglip_vision_model",)
PLACES = {
    "SiglipVisionModel": Place(kinds=KIND, prefixes=("vision_model.", "")),
    "SiglipModel": Place(kinds=KIND, prefixes=("vision_model.",), is_part=True),
    "Gemma3ForConditionalGeneration": Place(kinds=KIND, prefixes=WITHIN, is_part=True),
    "PaliGemmaForConditionalGeneration": Place(kinds=KIND, prefixes=WITHIN, is_part=True),
}

FAMILY = vision_family(PLACES.__getitem__)
