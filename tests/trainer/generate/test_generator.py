"""With cached keys and padded batches, the model says the tokens that it gives one by one, until its turn ends."""

from typing import Any

import pytest
import torch
import transformers as hf

from tests.trainer.conftest import GEMMA_TEMPLATE, make_tokenizer
from tests.trainer.models import (
    FLOAT32,
    PROMPTS,
    SCALED,
    assert_batched_as_alone,
    make_generator,
    make_latents,
    save_decoder,
)
from trainer.generate.generator import TurnEnd, turn_end
from trainer.model.load_language_model import load_with_whole
from trainer.text.chat import ChatTokenizer

MODELS: dict[str, Any] = {name: (kind, {**settings}) for name, (kind, settings) in SCALED.items()}
MODELS["soft cap"][1].update(final_logit_softcapping=30.0, tie_word_embeddings=False)
MODELS["qwen"] = (hf.Qwen3Config, {"head_dim": 16})


@pytest.mark.parametrize("model", MODELS)
def test_a_padded_batch_with_cached_keys_says_what_each_says(tmp_path, model):
    kind, settings = MODELS[model]
    save_decoder(tmp_path, kind, **settings, initializer_range=0.5)
    generator = make_generator(tmp_path, end=TurnEnd((), ""))
    assert_batched_as_alone(generator, {"world": make_latents(len(PROMPTS))})


def test_a_turn_ends_at_its_token_or_words_and_no_later(language_model):
    latents = make_latents(len(PROMPTS))
    said = make_generator(language_model, end=TurnEnd((), "")).generate_tokens({"world": latents}, PROMPTS)
    tokenizer = make_tokenizer()
    third = said[0][3]
    whole = [third in each for each in said]
    assert True in whole
    answers = make_generator(language_model, end=TurnEnd((third,), ""))({"world": latents}, PROMPTS)
    for tokens, answer in zip(said, answers, strict=True):
        length = tokens.index(third) if third in tokens else None
        assert answer == (tokenizer.decode(tokens[:length], skip_special_tokens=True).strip(), third in tokens)
    words = tokenizer.decode(said[0][3:5])
    answer, *_ = make_generator(language_model, end=TurnEnd((), words))({"world": latents}, PROMPTS)
    assert answer == (tokenizer.decode(said[0]).partition(words)[0].strip(), True)


NO_END = GEMMA_TEMPLATE.replace("<end_of_turn>", "")
WORDS_END = GEMMA_TEMPLATE.replace("<end_of_turn>", " right right")


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (GEMMA_TEMPLATE, [2, 9], TurnEnd((2, 5, 9), "")),
        (GEMMA_TEMPLATE, None, TurnEnd((2, 5), "")),
        (NO_END, 1, TurnEnd((1, 2), "")),
        (WORDS_END, None, TurnEnd((2,), "right right")),
        ("{{ raise_exception('never') }}", None, TurnEnd((2,), "")),
    ],
)
def test_the_end_is_eos_or_what_follows_the_assistants_words(language_model, template, eos, expected):
    _, whole = load_with_whole(str(language_model), FLOAT32, torch.device("cpu"))
    whole.generation_config.eos_token_id = eos
    chat = ChatTokenizer(make_tokenizer(), template, 64)
    assert turn_end(chat, whole, chat.end_of_turn()) == expected


def test_sampling_follows_its_seed_and_narrows_to_the_likeliest(language_model):
    latents = make_latents(len(PROMPTS))

    def said(seed: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return make_generator(language_model, end=TurnEnd((), ""), **options).generate_tokens(
            {"world": latents}, PROMPTS
        )

    greedy = said(0)
    assert said(0, temperature=1.0) == said(0, temperature=1.0) != said(1, temperature=1.0)
    assert said(0, temperature=1.0) != greedy
    assert said(0, temperature=1.0, top_p=1e-6) == said(7, temperature=1e-3) == greedy


def test_a_models_own_ways_of_generating_change_nothing(tmp_path, language_model, capfd):
    """Nor does transformers warn of options that do not fit together."""
    _, whole = load_with_whole(str(language_model), FLOAT32, torch.device("cpu"))
    own = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 2.0, "repetition_penalty": 9.0, "max_length": 9}
    whole.generation_config = hf.GenerationConfig(**own, suppress_tokens=[7, 8], min_new_tokens=4)
    whole.save_pretrained(tmp_path)
    capfd.readouterr()
    latents = make_latents(len(PROMPTS))
    ways = [
        make_generator(folder).generate_tokens({"world": latents}, PROMPTS) for folder in (tmp_path, language_model)
    ]
    assert ways[0] == ways[1]
    assert not [line for line in capfd.readouterr().err.splitlines() if line and "Loading weights" not in line]
