"""Checkpoints of small vision towers with random weights: towers alone, beside text towers, in multimodal models."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CLIPImageProcessorPil

SIDE, PATCHES, TOKENS, FEATURES, LAYERS = 32, 16, 4, 16, 3
"""Side of an image in pixels; its patches; Gemma 3's tokens of them; features of each; layers of a tower."""

STACK = {"hidden_size": FEATURES, "intermediate_size": 20, "num_attention_heads": 2}
VISION = {**STACK, "num_hidden_layers": LAYERS, "image_size": SIDE, "patch_size": 8}
TEXT = {**STACK, "num_hidden_layers": 1, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {
    "text_config": {**TEXT, "num_key_value_heads": 1, "head_dim": 8},
    "vision_config": {**VISION, "vision_use_head": False, "model_type": "siglip_vision_model"},
    "image_token_index": 63,
    "mm_tokens_per_image": TOKENS,
}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "image_token_index": 63,
}
TWO_TOWERS = {"vision_config": VISION, "text_config": TEXT}

TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SiglipVisionModel": ("SiglipVisionConfig", VISION),
    "SiglipModel": ("SiglipConfig", TWO_TOWERS),
    "Gemma3ForConditionalGeneration": ("Gemma3Config", GEMMA),
    "CLIPVisionModel": ("CLIPVisionConfig", VISION),
    "CLIPModel": ("CLIPConfig", {**TWO_TOWERS, "projection_dim": 8}),
    "LlavaForConditionalGeneration": ("LlavaConfig", LLAVA),
    "Dinov2Model": ("Dinov2Config", VISION),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", VISION),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {**VISION, "num_register_tokens": 2}),
    "ViTModel": ("ViTConfig", VISION),
    "ViTForImageClassification": ("ViTConfig", VISION),
}
"""By class of transformers: its config's class and values."""
SIGLIP_KINDS = ["SiglipVisionModel", "SiglipModel", "Gemma3ForConditionalGeneration"]
"""The classes with a SigLIP tower, which has no class token."""

CLIP_PROCESSOR = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def make_model(kind: str, config_class: str, values: dict[str, Any]) -> Any:
    """Make a frozen model of transformers with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**values)
    return getattr(transformers, kind)(config).eval().requires_grad_(False)


def random_model(kind: str) -> Any:
    """Make a model whose norms, biases and position embeddings differ from their initial values, as trained ones."""
    model = make_model(kind, *TOWERS[kind])
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "position" in name:
            weight.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.3)
    return model


def tower_of(model: Any) -> Any:
    """Return the vision tower in a model of any class."""
    for part in ("vision_model", "model.vision_tower", "vit"):
        try:
            return model.get_submodule(part)
        except AttributeError:
            continue
    return model


def save_model(kind: str, folder: Path) -> Path:
    random_model(kind).save_pretrained(folder)
    return folder


def gemma_tokens(model: Any, pixels_N3YX: torch.Tensor) -> torch.Tensor:
    """Return Gemma 3's own tokens of images, before its norm and matrix."""
    seen: list[torch.Tensor] = []
    norm = model.model.multi_modal_projector.mm_soft_emb_norm
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model.get_image_features(pixels_N3YX)
    hook.remove()
    return seen[0]
