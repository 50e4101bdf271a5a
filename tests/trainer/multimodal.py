"""A small multimodal Gemma 3 of random weights, whose vision tower and projector count as trained ones do."""

from pathlib import Path

import torch
import transformers as hf

from tests.trainer.conftest import TINY, make_tokenizer

BOI, EOI, IMAGE = 21, 22, 20
SIDE, PATCHES, TOKENS, FEATURES = 64, 64, 16, 24
"""Pixels of a side; patches of an image; tokens that they are pooled to; features of each."""

VISION = {
    "hidden_size": FEATURES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": SIDE, "patch_size": 8, "vision_use_head": False, "model_type": "siglip_vision_model",
}  # fmt: skip


def save_multimodal(folder: Path) -> Path:
    """An image has more tokens than the sliding window of the language model."""
    torch.manual_seed(0)
    markers = {"image_token_index": IMAGE, "boi_token_index": BOI, "eoi_token_index": EOI}
    text = {**TINY, "sliding_window": 12, "initializer_range": 0.3, "tie_word_embeddings": False}
    untied = {"mm_tokens_per_image": TOKENS, "tie_word_embeddings": False, "initializer_range": 0.3}
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, **untied, **markers)
    model = hf.Gemma3ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "projector" in name or "position" in name:
            weight.data.normal_(std=0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
