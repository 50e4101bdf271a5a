"""Text encoders that transformers runs, and where checkpoints keep them. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cache_store.format.array import ImageRecipe
from precompute.encoders.encoder import Encoder, Family, TextLocation, accept_any_size
from precompute.encoders.encoder_config import TEXT_FIELDS, EncoderConfig

if TYPE_CHECKING:
    from precompute.encoders.model_files import ModelFiles


WITHIN_MULTIMODAL = {"model.language_model.": "", "language_model.model.": ""}
"""Prefixes of a decoder's weights in a multimodal model; they depend on the transformers version that saved it."""


T5_NAMES = {"shared.": "shared.", "encoder.": "encoder."}
T5_KEYS = (
    *("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "layer_norm_epsilon", "feed_forward_proj"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
)
T5 = TextLocation(runs="T5EncoderModel", names=T5_NAMES, padding="seen", config_keys=T5_KEYS)
UMT5 = TextLocation(runs="UMT5EncoderModel", names=T5_NAMES, padding="zero", clean="prompt_clean", config_keys=T5_KEYS)

CLIP_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps"),
    *("max_position_embeddings", "vocab_size", "eos_token_id"),
)

gemma = partial(TextLocation, padding="zero", null_is_bare=True)

WITHIN_QWEN = {"model.visual.": None, **WITHIN_MULTIMODAL, "model.": ""}
"""Older checkpoints of Qwen2.5-VL have the decoder's weights beside its tower's."""

LOCATIONS = {
    "T5EncoderModel": T5,
    "T5ForConditionalGeneration": T5,
    "UMT5EncoderModel": UMT5,
    "UMT5ForConditionalGeneration": UMT5,
    "CLIPTextModel": TextLocation(
        runs="CLIPTextModel", names={"text_model.": "", "": ""}, padding="seen", config_keys=CLIP_KEYS
    ),
    "CLIPTextModelWithProjection": TextLocation(
        runs="CLIPTextModelWithProjection", names={"": ""}, padding="seen", config_keys=(*CLIP_KEYS, "projection_dim")
    ),
    "Gemma2Model": gemma(runs="Gemma2Model", names={"": ""}),
    "Gemma2ForCausalLM": gemma(runs="Gemma2Model", names={"model.": ""}),
    "Gemma3TextModel": gemma(runs="Gemma3TextModel", names={"": ""}),
    "Gemma3ForCausalLM": gemma(runs="Gemma3TextModel", names={"model.": ""}),
    "Gemma3ForConditionalGeneration": gemma(runs="Gemma3TextModel", names=WITHIN_MULTIMODAL),
    "Qwen3ForCausalLM": TextLocation(runs="Qwen3Model", names={"model.": ""}, padding="zero"),
    "Qwen3Model": TextLocation(runs="Qwen3Model", names={"": ""}, padding="zero"),
    "Qwen2ForCausalLM": TextLocation(runs="Qwen2Model", names={"model.": ""}, padding="zero"),
    "Qwen2Model": TextLocation(runs="Qwen2Model", names={"": ""}, padding="zero"),
    "Qwen2_5_VLForConditionalGeneration": TextLocation(runs="Qwen2_5_VLTextModel", names=WITHIN_QWEN, padding="zero"),
    "Qwen3VLForConditionalGeneration": TextLocation(
        runs="Qwen3VLTextModel", names={"model.language_model.": ""}, padding="zero"
    ),
    "Qwen3VLModel": TextLocation(runs="Qwen3VLTextModel", names={"language_model.": ""}, padding="zero"),
    "LlamaForCausalLM": TextLocation(runs="LlamaModel", names={"model.": ""}, padding="zero"),
    "LlamaModel": TextLocation(runs="LlamaModel", names={"": ""}, padding="zero"),
    "Mistral3ForConditionalGeneration": TextLocation(runs="MistralModel", names=WITHIN_MULTIMODAL, padding="left"),
}
"""By class: encoders of T5 and UMT5, CLIP's text tower, and decoders of language models, which give hidden states."""


def load(files: ModelFiles, config: EncoderConfig, image: ImageRecipe | None) -> Encoder:
    from precompute.encoders.text_encoder import TransformersTextEncoder

    return TransformersTextEncoder(files, LOCATIONS[files.class_name], config)


FAMILY = Family(load=load, refuse_size=accept_any_size, takes=("layer", *TEXT_FIELDS))
