"""DINOv2, with registers or without, and DINOv3: the last hidden state, behind the final norm."""

from precompute.encoders.towers.place import Place
from precompute.encoders.towers.vision import vision_family

PLACES = {
    "Dinov2Model": Place(kinds=("dinov2",)),
    "Dinov2WithRegistersModel": Place(kinds=("dinov2_with_registers",)),
    "DINOv3ViTModel": Place(kinds=("dinov3_vit",)),
}

FAMILY = vision_family(PLACES.__getitem__)
