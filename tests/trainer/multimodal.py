"""Small multimodal checkpoints of random weights."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.trainer.conftest import GEMMA_TEMPLATE, TINY, make_tokenizer

BOI, EOI, IMAGE = 21, 22, 20
SIDE, PATCHES, TOKENS, FEATURES = 64, 64, 16, 24
"""Pixels of a side, patches of an image, tokens that they are pooled to, features of each patch."""

VISION = {
    "hidden_size": FEATURES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": SIDE, "patch_size": 8, "vision_use_head": False, "model_type": "siglip_vision_model",
}  # fmt: skip


DECODER = {
    **{name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    **{name: TINY[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SIGLIP, CLIP = {**VIT, "model_type": "siglip_vision_model"}, {**VIT, "model_type": "clip_vision_model"}
QWEN = {"depth": 2, "num_heads": 2, "intermediate_size": 32, "hidden_size": 32}
QWEN_3 = {**QWEN, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
MARKERS = {"image_token_id": 20, "video_token_id": 19, "vision_start_token_id": 18, "vision_end_token_id": 17}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHUNKED = {
    "head_dim": 16, "attention_chunk_size": 10, "num_local_experts": 4, "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64, "no_rope_layers": [1, 0],
}  # fmt: skip
LLAMA_4_VIT = {**VIT, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32}

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""LLaVA 1.5's template, shortened: nothing ends a turn."""


def configured(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": {**DECODER, **text}, "vision_config": vision, **more}


GEMMA = {**TINY, "sliding_window": 12, "tie_word_embeddings": False}
"""An image has more tokens than its sliding window."""
IMAGE_TOKENS = {
    "mm_tokens_per_image": TOKENS, "image_token_index": IMAGE, "boi_token_index": BOI, "eoi_token_index": EOI,
}  # fmt: skip

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": GEMMA, "vision_config": VISION, "tie_word_embeddings": False, **IMAGE_TOKENS},
    "qwen2_vl": configured(ROPE, {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}, **MARKERS),
    "qwen2_5_vl": configured(ROPE, {**QWEN, "out_hidden_size": 32}, **MARKERS, tie_word_embeddings=True),
    "qwen3_vl": configured({**ROPE, "head_dim": 16}, QWEN_3, **MARKERS),
    "qwen3_vl_moe": configured({**ROPE, **EXPERTS, "head_dim": 16}, QWEN_3, **MARKERS),
    "llava": configured({"model_type": "llama"}, CLIP, image_token_index=20),
    "llava_next": configured({"model_type": "llama"}, CLIP, image_token_index=20),
    "llava_next_video": configured({"model_type": "llama"}, CLIP, image_token_index=20, video_token_index=19),
    "llava_onevision": configured({"model_type": "qwen2"}, SIGLIP, image_token_index=20, video_token_index=19),
    "paligemma": configured({"model_type": "gemma", "head_dim": 16}, SIGLIP, projection_dim=32, image_token_index=20),
    "paligemma2": configured(
        {"model_type": "gemma2", "head_dim": 16, "sliding_window": 12}, SIGLIP, projection_dim=32,
        image_token_index=20, tie_word_embeddings=False,
    ),
    "llama4": configured(CHUNKED, {**LLAMA_4_VIT, "projector_output_dim": 32}, image_token_index=20),
}  # fmt: skip
"""Config values, by model type; sequences are longer than windows and chunks."""


def make_whole(name: str) -> Any:
    """Make a model whose words depend on what it reads, and whose projector is not the identity."""
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model("paligemma" if name == "paligemma2" else name, **CHECKPOINTS[name])
    for part in (config, config.text_config):
        part.initializer_range = 0.3 if name == "gemma3" else 0.5
    whole = hf.AutoModelForImageTextToText.from_config(config).eval()
    for name, weight in whole.named_parameters():
        if "multi_modal_projector" in name or "position" in name:
            weight.data.normal_(std=0.3)
    return whole


def save_checkpoint(name: str, folder: Path) -> Any:
    """Save the whole model and a tokenizer; return the model.

    Qwen models have no BOS; LLaVA's template is the processor's, and reads parts.
    """
    whole = make_whole(name)
    whole.save_pretrained(folder)
    tokenizer = make_tokenizer(None if name == "llava" else GEMMA_TEMPLATE)
    if name.startswith("qwen"):
        tokenizer.bos_token = None
    tokenizer.save_pretrained(folder)
    if name == "llava":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA_TEMPLATE}))
    return whole


def save_gemma(folder: Path) -> Path:
    save_checkpoint("gemma3", folder)
    return folder
