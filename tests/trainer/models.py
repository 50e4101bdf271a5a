"""Small language models and multimodal checkpoints, and the projector, inputs and generator around them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.trainer.conftest import GEMMA_TEMPLATE, MEAN, STD, TINY, make_tokenizer
from trainer.data.batches import model_input
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Generator, TurnEnd
from trainer.model.language_model import LanguageModel
from trainer.model.load_language_model import load_with_whole
from trainer.model.model import ModelInput, WorldModel
from trainer.model.projector import Projector, Projectors
from trainer.text.chat import ChatTokenizer, Message
from trainer.text.store import TextBatch

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def load(folder: Path, dtype: torch.dtype = FLOAT32) -> LanguageModel:
    return load_with_whole(str(folder), dtype, torch.device("cpu"))[0]


def save_decoder(folder: Path, kind: type[hf.PreTrainedConfig], **settings: object) -> Path:
    """Save a tiny model of another architecture, with random weights."""
    ours = {name: value for name, value in TINY.items() if name not in ("layer_types", "sliding_window", "head_dim")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(kind(**{**ours, **special, **settings})).save_pretrained(folder)
    return folder


def drop_weights(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


LAYER_TYPES = {"layer_types": TINY["layer_types"]}
MULTIPLIERS = {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
SCALED = {
    "none": (hf.LlamaConfig, {}),
    "gpt2": (hf.GPT2Config, {}),
    "soft cap": (hf.Gemma3TextConfig, {"final_logit_softcapping": 0.1, "head_dim": 16, **LAYER_TYPES}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.0625}),
    "cohere2": (hf.Cohere2Config, {"logit_scale": 0.3, **LAYER_TYPES}),
    "granite": (hf.GraniteConfig, MULTIPLIERS),
    "falcon_h1": (hf.FalconH1Config, {"lm_head_multiplier": 0.3, **MAMBA}),
    "hyperclovax": (hf.HyperCLOVAXConfig, {"logits_scaling": 6.0}),
}
"""Models that scale or cap their logits: loading one compares our logits with its own."""


def make_projector(layout: str = "spatial", shape: str = "mlp", width: int = 24, seed: int = 0) -> Projector:
    return Projector(sample_shape=(4, 3, 2), width=width, layout=layout, shape=shape, mean=MEAN, std=STD, seed=seed)


def make_latents(count: int = 64) -> torch.Tensor:
    noise = torch.randn(count, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


def make_model(folder: Path, dtype: torch.dtype = FLOAT32, *, bos: bool = True) -> WorldModel:
    language = load(folder, dtype)
    projector = make_projector(width=language.width)
    projector.match_rms(make_latents(), language.embedding_rms())
    return WorldModel(language, Projectors({"world": projector}), begins_with_bos=bos)


def make_input() -> ModelInput:
    """Make three samples whose last three tokens are labels."""
    tokens, is_label = np.random.default_rng(0).integers(6, 20, (3, 9)), np.zeros((3, 9), bool)
    for row, length in enumerate((9, 5, 7)):
        tokens[row, length:] = 0
        is_label[row, length - 3 : length] = True
    sample, column = np.nonzero(is_label)
    return model_input({"world": make_latents(3)}, TextBatch(tokens, sample, column, tokens[sample, column]))


PROMPTS = [
    [{"role": "user", "content": words}]
    for words in (
        "what is this",
        "is it red",
        "",
        "what is this and is it a blue square and is this a green ring and what",
    )
]


def make_generator(
    folder: Path, *, template: str = GEMMA_TEMPLATE, end: TurnEnd | None = None, **options: Any
) -> Generator:
    language, whole = load_with_whole(str(folder), FLOAT32, torch.device("cpu"))
    projector = make_projector(width=language.width)
    projector.match_rms(make_latents(), language.embedding_rms())
    chat = ChatTokenizer(make_tokenizer(), template, 64)
    model = WorldModel(language, Projectors({"world": projector}), begins_with_bos=True)
    config = GenerateConfig(rows="0", **{"max_tokens": 12, **options})
    return Generator(model, whole, chat, end or TurnEnd((5,), ""), config)


@torch.no_grad()
def word_by_word(
    generator: Generator, latents: dict[str, torch.Tensor], messages: list[Message], count: int
) -> list[int]:
    """Return the likeliest tokens, each from the whole sequence before it, as training runs it."""
    tokens = generator.chat.prompt_tokens(messages).tolist()
    start, language = len(tokens), generator.model.language
    for _ in range(count):
        hidden = generator.model.hidden(latents, torch.tensor([tokens]))
        tokens.append(int(language.logits(hidden[:, -1]).argmax()))
    return tokens[start:]


def assert_batched_as_alone(generator: Generator, latents: dict[str, torch.Tensor]) -> None:
    """Check that prompts in a padded batch, with cached keys, get the words that each gets word by word."""
    own = [{name: each[[row]] for name, each in latents.items()} for row in range(len(PROMPTS))]
    alone = [word_by_word(generator, *sample, 12) for sample in zip(own, PROMPTS, strict=True)]
    assert generator.generate_tokens(latents, PROMPTS) == alone
    assert len({tuple(each) for each in alone}) > 1


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
