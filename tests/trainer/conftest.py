"""Tiny models, made here and loaded as any other: a Gemma 3 text model and a word-level tokenizer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from tests.make_cache import make_cache
from tests.named import assert_names
from tests.trainer.runs import command, make_config
from trainer.cli import main
from trainer.config import TrainConfig

SPECIAL = "<pad> <bos> <eos> <unk> <start_of_turn> <end_of_turn>"
WORDS = "user model what is this it a and yes red green blue square circle ring left right"
VOCABULARY = [*SPECIAL.split(), "\n", *WORDS.split()]

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

TINY = {
    "vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16,
    "max_position_embeddings": 256, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def make_tokenizer(template: str | None = GEMMA_TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a tokenizer of words, cut at spaces, and line ends."""
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    cuts = [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<start_of_turn>", "<end_of_turn>"], chat_template=template,
    )  # fmt: skip


def save_language_model(folder: Path, **config: object) -> Path:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**TINY, **config}))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_language_model(tmp_path_factory.mktemp("lm"))


def describe(row: int) -> list[dict[str, str]]:
    """Return one or two turns; lengths differ between samples."""
    colour, shape = ("red", "green", "blue")[row % 3], ("square", "circle", "ring")[row // 3 % 3]
    turns = [("human", "<image>\nwhat is this"), ("gpt", " ".join(["a", colour, shape, "and", "it"][: 3 + row % 3]))]
    if row % 4 == 0:
        turns += [("human", f"is it {colour}"), ("gpt", "yes")]
    return [{"from": who, "value": text} for who, text in turns]


def described_cache(path: Path, rows: int, **options: Any) -> Path:
    """Make a small cache; more `rows` only add to it."""
    latents = np.random.default_rng(0).standard_normal((rows, 4, 2, 2), np.float32)
    return make_cache(path, **{"latents": latents, "conversations": [describe(row) for row in range(rows)], **options})


MEAN, STD = (0.5, -1.0, 2.0, 0.0), (2.0, 0.5, 3.0, 1.0)
MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 samples of 4 channels and 3×2 cells, far from standard normal, three of them rejected."""
    scale, centre = (np.array(each, np.float32)[:, None, None] for each in (STD, MEAN))
    latents = np.random.default_rng(0).standard_normal((40, 4, 3, 2), np.float32) * scale + centre
    options = {"rejected": [3, 17, 39], "dtype": "float32", "latents_mean": MEAN, "latents_std": STD}
    return described_cache(tmp_path_factory.mktemp("cached") / "cache", 40, latents=latents, **options)


@pytest.fixture
def configured(cache_path: Path, language_model: Path, tmp_path: Path) -> MakeConfig:
    """Make the config of a run whose output and text lie in the test's own folder."""
    return partial(make_config, tmp_path, cache=cache_path, language_model=language_model)


@pytest.fixture(scope="module")
def configured_here(cache_path: Path, language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """Make the config of a run that shares folder and tokenised text with others of its module."""
    return partial(make_config, tmp_path_factory.mktemp("runs"), cache=cache_path, language_model=language_model)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must end with a code and a message of these words; return the message."""

    def run(code: int, config: TrainConfig, program: str = "train", *options: str, names: str = "") -> str:
        capsys.readouterr()
        assert main([*command(config, program), *options]) == code
        error = capsys.readouterr().err
        assert_names(error, f"trainer: {names}")
        assert "Traceback" not in error
        return error

    return run
