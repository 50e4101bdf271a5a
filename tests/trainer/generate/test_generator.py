"""What is generated with cached keys in padded batches is what the model says word by word, until its turn ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cache_store.errors import ConfigError, SourceError
from tests.trainer.conftest import GEMMA_TEMPLATE, make_tokenizer
from tests.trainer.model.test_model import FLOAT32, SCALED, make_latents, make_projector, save_decoder, save_multimodal
from trainer.generate.config import GenerateConfig
from trainer.generate.generator import Generator, TurnEnd, turn_end
from trainer.model.load_language_model import load_with_whole
from trainer.model.model import WorldModel
from trainer.model.projector import Projectors
from trainer.text.chat import ChatTokenizer, Message

PROMPTS = [
    [{"role": "user", "content": words}]
    for words in (
        "what is this",
        "is it red",
        "",
        "what is this and is it a blue square and is this a green ring and what",
    )
]
MODELS: dict[str, Any] = {name: (kind, {**settings}) for name, (kind, settings, _) in SCALED.items()}
MODELS["soft cap"][1].update(final_logit_softcapping=30.0, tie_word_embeddings=False)
MODELS["qwen"] = (hf.Qwen3Config, {"head_dim": 16})
MODELS["multimodal"] = (None, {})


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
    """The likeliest tokens, each from the whole sequence before it, as training runs it."""
    tokens = generator.chat.prompt_tokens(messages).tolist()
    start, language = len(tokens), generator.model.language
    for _ in range(count):
        hidden = generator.model.hidden(latents, torch.tensor([tokens]))
        tokens.append(int(language.logits(hidden[:, -1]).argmax()))
    return tokens[start:]


@pytest.mark.parametrize("model", MODELS)
def test_a_padded_batch_with_cached_keys_says_what_each_says(tmp_path, model):
    kind, settings = MODELS[model]
    save_decoder(tmp_path, kind, **settings, initializer_range=0.5) if kind else save_multimodal(tmp_path)
    generator, latents = make_generator(tmp_path, end=TurnEnd((), "")), make_latents(len(PROMPTS))
    alone = [word_by_word(generator, {"world": latents[[row]]}, each, 12) for row, each in enumerate(PROMPTS)]
    assert generator.generate_tokens({"world": latents}, PROMPTS) == alone
    assert len({tuple(each) for each in alone}) > 1


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
        assert answer.text == tokenizer.decode(tokens[:length], skip_special_tokens=True).strip()
        assert answer.is_whole == (third in tokens)
    words = tokenizer.decode(said[0][3:5])
    answer, *_ = make_generator(language_model, end=TurnEnd((), words))({"world": latents}, PROMPTS)
    assert (answer.text, answer.is_whole) == (tokenizer.decode(said[0]).partition(words)[0].strip(), True)


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
    """Nor do they make transformers warn of options that do not fit together."""
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
    assert capfd.readouterr().err == ""


def test_what_the_user_types_is_words_and_fits_the_model(language_model):
    generator = make_generator(language_model)
    with pytest.raises(
        SourceError, match="it says '<end_of_turn>', which this tokenizer can only encode as a special token"
    ):
        generator({"world": make_latents(1)}, [[{"role": "user", "content": "red <end_of_turn>"}]])
    with pytest.raises(ConfigError, match=r"knows 256 positions: set --max_tokens lower"):
        make_generator(language_model, max_tokens=250)({"world": make_latents(1)}, PROMPTS[:1])
    refusing = replace_template(generator, "{{ raise_exception('no') }}")
    with pytest.raises(SourceError, match="the chat template refuses it: no"):
        refusing({"world": make_latents(1)}, PROMPTS[:1])


def replace_template(generator: Generator, template: str) -> Generator:
    generator.chat.template = template
    return generator
