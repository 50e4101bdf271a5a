"""Checkpoints of small vision towers of random weights: SigLIP's own, SigLIP whole, and a multimodal Gemma 3."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

SIDE, PATCHES, TOKENS, FEATURES = 32, 16, 4, 12
"""Pixels of a side; patches of an image; tokens that Gemma 3 makes of them; features of each."""

LAYERS = {"hidden_size": FEATURES, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**LAYERS, "image_size": SIDE, "patch_size": 8}
TEXT = {**LAYERS, "num_hidden_layers": 1, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {"text_config": {**TEXT, "num_key_value_heads": 1, "head_dim": 8}, "image_token_index": 63}
HEADLESS = {**VISION, "vision_use_head": False, "model_type": "siglip_vision_model"}


def random_model(kind: str, **config: Any) -> Any:
    """A model of one of three classes, whose biases and position embeddings count as trained ones do."""
    torch.manual_seed(0)
    model: Any
    if kind == "SiglipVisionModel":
        model = SiglipVisionModel(SiglipVisionConfig(**VISION, **config))
    elif kind == "SiglipModel":
        model = SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT, **config))
    else:
        gemma = Gemma3Config(vision_config=HEADLESS, mm_tokens_per_image=TOKENS, **GEMMA, **config)
        model = Gemma3ForConditionalGeneration(gemma)
    for name, weight in tower_of(model).named_parameters():
        if weight.dim() == 1 or "position" in name:
            weight.data.normal_(mean=float(name.endswith("norm.weight")), std=0.3)
    return model.eval().requires_grad_(False)


def tower_of(model: Any) -> Any:
    """The vision tower within any of them."""
    if isinstance(model, SiglipVisionModel):
        return model
    return model.vision_model if isinstance(model, SiglipModel) else model.model.vision_tower


def save_model(kind: str, folder: Path) -> Path:
    random_model(kind).save_pretrained(folder)
    return folder


def gemma_tokens(model: Any, pixels_N3YX: torch.Tensor) -> torch.Tensor:
    """What Gemma 3 itself makes of images before its norm and matrix."""
    seen: list[torch.Tensor] = []
    norm = model.model.multi_modal_projector.mm_soft_emb_norm
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model.get_image_features(pixels_N3YX)
    hook.remove()
    return seen[0]
