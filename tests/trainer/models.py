"""Small language models, and the projector, the inputs and the generator that tests put around them."""

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
