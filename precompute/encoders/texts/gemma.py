"""The decoder of Gemma 2 or 3, as a text encoder: hidden states of a text."""

from precompute.encoders.texts.held import WITHIN_MULTIMODAL, Held
from precompute.encoders.texts.text_family import text_family

FAMILY = text_family(
    {
        "Gemma2Model": Held(runs="Gemma2Model", names={"": ""}, padding="masked"),
        "Gemma2ForCausalLM": Held(runs="Gemma2Model", names={"model.": ""}, padding="masked"),
        "Gemma3TextModel": Held(runs="Gemma3TextModel", names={"": ""}, padding="masked"),
        "Gemma3ForCausalLM": Held(runs="Gemma3TextModel", names={"model.": ""}, padding="masked"),
        "Gemma3ForConditionalGeneration": Held(runs="Gemma3TextModel", names=WITHIN_MULTIMODAL, padding="masked"),
    }
)
