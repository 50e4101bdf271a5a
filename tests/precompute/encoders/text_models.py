"""Narrow text encoders with random weights, and tokenizers of bytes, in the folders of a diffusers pipeline."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.precompute.encoders.towers import make_model

SPECIAL = ("<pad>", "</s>", "<s>")
PAD, EOS, BOS = range(3)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *LETTERS))}
SIZE, FEATURES, LAYERS = len(VOCABULARY), 16, 4

T5 = {"d_model": FEATURES, "d_kv": 8, "d_ff": 24, "num_layers": LAYERS, "num_heads": 2, "vocab_size": SIZE}
STACK = {"hidden_size": FEATURES, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
KNOWN = {"vocab_size": SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
DECODER = {**STACK, **KNOWN, "num_key_value_heads": 1, "head_dim": 8}
CLIP = {**STACK, **KNOWN, "max_position_embeddings": 77}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": FEATURES}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_VL = {
    "text_config": {**DECODER, "rope_parameters": ROPE},
    "vision_config": {**VISION, "fullatt_block_indexes": [0]},
}

QWEN3_VISION = {**VISION, "depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_VL = {"text_config": {**DECODER, "rope_parameters": ROPE}, "vision_config": QWEN3_VISION}
PIXTRAL = {**STACK, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8, "model_type": "pixtral"}
MISTRAL3 = {"text_config": {**DECODER, "model_type": "mistral"}, "vision_config": PIXTRAL}

TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5EncoderModel": ("T5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "UMT5EncoderModel": ("UMT5Config", T5),
    "CLIPTextModel": ("CLIPTextConfig", CLIP),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", {**CLIP, "projection_dim": 8}),
    "Gemma2Model": ("Gemma2Config", DECODER),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", DECODER),
    "Qwen3ForCausalLM": ("Qwen3Config", DECODER),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", QWEN_VL),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", QWEN3_VL),
    "Qwen3VLModel": ("Qwen3VLConfig", QWEN3_VL),
    "LlamaModel": ("LlamaConfig", DECODER),
    "Mistral3ForConditionalGeneration": ("Mistral3Config", MISTRAL3),
}
"""By class of transformers: its config's class and values."""

AROUND = {"T5": "$A </s>", "UMT5": "$A </s>", "CLIP": "<s> $A </s>", "Qwen": "$A"}
AROUND |= dict.fromkeys(("Gemma", "Llama", "Mistral"), "<s> $A")
"""Special tokens around a text, by prefix of the class."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3's chat template, for one question."""

MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content[0].text %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ text }}[/INST]{% endif %}{% endfor %}"
)
"""Mistral's, for a system message and a question."""


def random_text_model(kind: str) -> Any:
    """Make a model whose norms, biases and embeddings differ from their initial values, as trained ones."""
    model = make_model(kind, *TEXT_MODELS[kind])
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.normal_(mean=float(name.endswith("norm.weight")), std=0.3)
        elif "embed" in name or "shared" in name:
            weight.normal_(std=1.0)
    return model


def make_text_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    around = next(each for begins, each in AROUND.items() if kind.startswith(begins))
    special = [(token, number) for number, token in enumerate(SPECIAL) if token in around]
    if special:
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        chat_template=MISTRAL_CHAT if kind.startswith("Mistral") else CHAT,
        model_max_length=40,
        padding_side="left" if kind.startswith("Mistral") else "right",
    )


def save_text_encoder(kind: str, folder: Path, which: str = "") -> Path:
    """Save a text encoder and its tokenizer as a pipeline does, in text_encoder and tokenizer, each plus `which`."""
    random_text_model(kind).save_pretrained(folder / f"text_encoder{which}")
    make_text_tokenizer(kind).save_pretrained(folder / f"tokenizer{which}")
    return folder
