"""Text encoders that transformers runs, and where checkpoints keep them; nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import OF_TEXTS, EncoderConfig
from precompute.encoders.encoder import Encoder, Family, PixelRange
from precompute.encoders.model_files import Held, ModelFiles

WITHIN_MULTIMODAL = {"model.language_model.": "", "language_model.model.": ""}
"""Names of a decoder's weights in a multimodal model begin so, by the version of transformers that saved it."""


T5_NAMES = {"shared.": "shared.", "encoder.": "encoder."}
T5_KEYS = (
    *("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "layer_norm_epsilon", "feed_forward_proj"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
)
T5 = Held(runs="T5EncoderModel", names=T5_NAMES, padding="seen", config_keys=T5_KEYS)
UMT5 = Held(runs="UMT5EncoderModel", names=T5_NAMES, padding="zero", config_keys=T5_KEYS)

CLIP_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps"),
    *("max_position_embeddings", "vocab_size", "eos_token_id"),
)

WITHIN_QWEN = {"model.visual.": None, **WITHIN_MULTIMODAL, "model.": ""}
"""Older checkpoints of Qwen2.5-VL have the decoder's weights beside its tower's."""

HELD = {
    "T5EncoderModel": T5,
    "T5ForConditionalGeneration": T5,
    "UMT5EncoderModel": UMT5,
    "UMT5ForConditionalGeneration": UMT5,
    "CLIPTextModel": Held(
        runs="CLIPTextModel", names={"text_model.": "", "": ""}, padding="seen", config_keys=CLIP_KEYS
    ),
    "CLIPTextModelWithProjection": Held(
        runs="CLIPTextModelWithProjection", names={"": ""}, padding="seen", config_keys=(*CLIP_KEYS, "projection_dim")
    ),
    "Gemma2Model": Held(runs="Gemma2Model", names={"": ""}, padding="masked"),
    "Gemma2ForCausalLM": Held(runs="Gemma2Model", names={"model.": ""}, padding="masked"),
    "Gemma3TextModel": Held(runs="Gemma3TextModel", names={"": ""}, padding="masked"),
    "Gemma3ForCausalLM": Held(runs="Gemma3TextModel", names={"model.": ""}, padding="masked"),
    "Gemma3ForConditionalGeneration": Held(runs="Gemma3TextModel", names=WITHIN_MULTIMODAL, padding="masked"),
    "Qwen3ForCausalLM": Held(runs="Qwen3Model", names={"model.": ""}, padding="zero"),
    "Qwen3Model": Held(runs="Qwen3Model", names={"": ""}, padding="zero"),
    "Qwen2ForCausalLM": Held(runs="Qwen2Model", names={"model.": ""}, padding="zero"),
    "Qwen2Model": Held(runs="Qwen2Model", names={"": ""}, padding="zero"),
    "Qwen2_5_VLForConditionalGeneration": Held(runs="Qwen2_5_VLTextModel", names=WITHIN_QWEN, padding="zero"),
}
"""By class: encoders of T5 and UMT5, CLIP's text tower, decoders of Gemma and Qwen as encoders of hidden states."""


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    from precompute.encoders.transformers_text import load_text_encoder

    return load_text_encoder(files, HELD[files.class_name], config)


def any_size(config: Mapping[str, Any], height: int, width: int) -> None:
    """Accept any size: a text encoder reads no images."""


FAMILY = Family(load=load, refuse_size=any_size, takes=("layer", *OF_TEXTS))
