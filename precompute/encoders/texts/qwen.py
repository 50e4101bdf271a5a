"""The decoder of Qwen 2, 2.5, 2.5-VL or 3, as a text encoder: hidden states of a text."""

from precompute.encoders.texts.held import WITHIN_MULTIMODAL, Held
from precompute.encoders.texts.text_family import text_family

FLAT = {"model.visual.": None, **WITHIN_MULTIMODAL, "model.": ""}
"""Older checkpoints of Qwen2.5-VL have the decoder's weights beside its tower's."""

FAMILY = text_family(
    {
        "Qwen3ForCausalLM": Held(runs="Qwen3Model", names={"model.": ""}, padding="zero"),
        "Qwen3Model": Held(runs="Qwen3Model", names={"": ""}, padding="zero"),
        "Qwen2ForCausalLM": Held(runs="Qwen2Model", names={"model.": ""}, padding="zero"),
        "Qwen2Model": Held(runs="Qwen2Model", names={"": ""}, padding="zero"),
        "Qwen2_5_VLForConditionalGeneration": Held(runs="Qwen2_5_VLTextModel", names=FLAT, padding="zero"),
    }
)
