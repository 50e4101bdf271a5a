"""`trainer generate`: its images and questions; padded batches with cached keys say what training would give."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.named import assert_names
from tests.trainer.answers import filled, reported
from tests.trainer.conftest import (
    GEMMA_TEMPLATE,
    MEAN,
    STD,
    MakeConfig,
    describe,
    described_cache,
    make_tokenizer,
    save_language_model,
)
from tests.trainer.models import (
    FLOAT32,
    PROMPTS,
    SCALED,
    assert_batched_as_alone,
    make_generator,
    make_latents,
    save_decoder,
)
from tests.trainer.runs import train_alone
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.generate.generator import TurnEnd, turn_end
from trainer.model.load_language_model import load_with_whole
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.folder import checkpoints_of
from trainer.text.chat import ChatTokenizer, to_messages


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("trained", max_steps=2, save_every=1))


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return lambda place, *options: reported(place, tmp_path / "report.json", *options)


def test_rows_are_asked_their_own_questions_or_the_users(trained, answers, capsys):
    """Rows or ids, run, checkpoint or file with a cache, batches of any size: the answers are the same."""
    options = "--rows=8,0,38,8", "--max_tokens=6"
    said = answers(trained.run.folder, *options)
    printed = capsys.readouterr().out
    assert [each["row"] for each in said] == [8, 0, 38, 8]
    assert said[0] == said[3] != said[1]
    for each in said:
        question, reference, *_ = (message["content"] for message in to_messages(describe(each["row"])))
        assert (each["id"], each["prompt"], each["reference"]) == (f"sample-{each['row']:06d}", question, reference)
        held_out, cut = ", held out of training" * each["held_out"], " […]" * (not each["is_whole"])
        lines = [f"row {each['row']}, {each['id']}{held_out}", f"  prompt     {question}"]
        lines += [f"  answer     {each['answer']}{cut}", f"  reference  {reference}\n"]
        assert "\n".join(lines) in printed
    ids = "--ids=sample-000008,sample-000000,sample-000038,sample-000008", "--max_tokens=6", "--batch_size=1"
    places = [trained.run.folder, checkpoints_of(trained.run).path(2)]
    assert [answers(place, *ids) for place in places] == [said, said]
    file = trained.run.folder / PROJECTOR_FILE
    assert answers(file, *options, "--prompt=is it red", f"--cache={trained.cache}") != said
    asked = answers(file, *options, "--prompt=what is this", f"--cache={trained.cache}")
    assert [each["answer"] for each in asked[:2]] == [each["answer"] for each in said[:2]]
    assert not any("reference" in each for each in asked)


def twelve_latents() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((12, 4, 3, 2), np.float32)


REFUSED = [
    (2, ["--rows=1", "--image=a"], "--rows --ids --image"),
    (2, ["--rows=40"], "rows 40"),
    (2, ["--rows=2,17"], "17 CACHE"),
    (2, ["--ids=sample-000001,x,y"], "ids 'x', 'y'"),
    (2, ["--rows=1", "--max_tokens=250"], "--max_tokens 256"),
    (2, ["--rows=1", "--language_model=HOME/none"], "model.language_model HOME/none"),
    (2, ["--rows=1", "--report=CACHE/seal.json"], "report CACHE/seal.json"),
    (2, ["--image=a.png"], "--prompt"),
    (2, ["--image=a.png", "--prompt=a"], "image a.png"),
    (2, ["--rows=1", "--encoder=c"], "--encoder --image"),
    (2, ["--rows=1", "--cache=a", "--caches={world: a}"], "--cache --caches"),
    (2, ["--rows=1", "--caches={worl: a}"], "worl world?"),
    (1, ["--rows=1", "--prompt=<end_of_turn>"], "<end_of_turn>"),
]


@pytest.mark.parametrize(("code", "options", "names"), REFUSED)
def test_a_request_that_cannot_be_met_is_one_message(trained, tmp_path, capsys, code, options, names):
    *options, names = filled([*options, names], CACHE=trained.cache, HOME=tmp_path)
    refused(capsys, code, names, trained.run.folder, *options)


def refused(capsys: Any, code: int, names: str, *arguments: object) -> None:
    assert main(["generate", *map(str, arguments)]) == code
    error: str = capsys.readouterr().err
    assert error.count("trainer: error: ") == 1
    assert_names(error, names)


def test_another_model_cache_or_run_is_refused_unless_its_samples_mean_the_same(trained, answers, tmp_path, capsys):
    run, ask = trained.run.folder, "--rows=1"
    other = save_language_model(tmp_path / "other", rms_norm_eps=1e-5)
    refused(capsys, 1, f"{other} {trained.model.language_model}", run, ask, f"--language_model={other}")
    alike = described_cache(tmp_path / "alike", 12, latents=twelve_latents(), latents_mean=MEAN, latents_std=STD)
    assert [each["row"] for each in answers(run, "--rows=1,2", f"--cache={alike}")] == [1, 2]
    rescaled = described_cache(tmp_path / "rescaled", 12, latents=twelve_latents(), latents_std=[1.0, 2.0, 3.0, 4.0])
    refused(capsys, 1, f"{rescaled} world encoder.latents_std", run, ask, f"--cache={rescaled}")
    refused(capsys, 2, f"{tmp_path}/none", tmp_path / "none", ask)
    refused(capsys, 2, "--cache", shutil.copy(run / PROJECTOR_FILE, tmp_path), ask)


def test_a_model_or_cache_that_has_moved_is_asked_for(configured, tmp_path, capsys):
    cache, model = described_cache(tmp_path / "cache", 16), save_language_model(tmp_path / "lm")
    run = train_alone(configured(cache=cache, language_model=model, max_steps=1)).run.folder
    model.rename(tmp_path / "moved")
    refused(capsys, 2, f"{model} --language_model", run, "--rows=1")
    cache.rename(tmp_path / "moved cache")
    options = ["--rows=1", f"--language_model={tmp_path}/moved"]
    refused(capsys, 2, f"{cache} --cache", run, *options)
    assert main(["generate", str(run), *options, f"--cache={tmp_path}/moved cache"]) == 0


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
