"""The commands `train` and `eval`: their output, their files, and their refusals before they write."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from tests.make_cache import make_cache
from tests.trainer.conftest import MEAN, STD, TINY, MakeConfig, described_cache, save_language_model
from tests.trainer.runs import ForkedTrainer, command, metrics, named_fields
from trainer.cli import main


def test_a_config_file_is_trained_resumed_and_evaluated(cache_path, language_model, tmp_path, monkeypatch, capsys):
    """Its paths may begin with ~, and options override it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lm").symlink_to(language_model)
    (tmp_path / "train.yaml").write_text(
        f"cache: {cache_path}\nmodel: {{language_model: ~/lm, projector: linear}}\n"
        "data: {max_text_tokens: 64, val_fraction: 0.2, text_dir: ~/text}\n"
        "run: {output: ~/run, precision: fp32, save_every: 1, max_steps: 9}\n"
    )
    assert main(["train", f"--config={tmp_path}/train.yaml", "--run.max_steps=2", "--data.batch_size=32"]) == 0
    shown = capsys.readouterr().out
    assert "samples: 30 to train on, 7 held out" in shown
    assert "data.batch_size 32 is larger than the training set: every batch repeats samples" in shown
    resolved = f"--config={tmp_path}/run/config.yaml"
    assert main(["train", resolved]) == 0
    assert "resuming after step 2 of 2" in capsys.readouterr().out
    assert main(["eval", resolved, "--report=~/eval.json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "eval.json").read_text())
    assert printed["step"] == 2
    assert printed["own"] == pytest.approx(metrics(tmp_path / "run", "val_loss")[2], rel=1e-5)
    assert printed["shuffled"] == pytest.approx(metrics(tmp_path / "run", "val_loss_shuffled")[2], rel=1e-5)
    assert main(["eval", resolved, "--checkpoint=~/run/checkpoints/step-00000001"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 1
    made = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}  # matplotlib's, in a new home
    assert made == {"eval.json", "lm", "run", "text", "train.yaml"}


def changed_model(home: Path, file: str, text: str | None) -> dict[str, Path]:
    """Save a model with one file changed to this text, or deleted."""
    for path in save_language_model(home / "lm").glob(file):
        path.unlink() if text is None else path.write_text(text)
    return {"language_model": home / "lm"}


def template_file(home: Path, template: str) -> dict[str, str]:
    (home / "chat.jinja").write_text(template)
    return {"chat_template": str(home / "chat.jinja")}


def cut_cache(home: Path) -> dict[str, Path]:
    (shard,) = described_cache(home / "cache", 16).glob("latents/c/1/0/0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    return {"cache": home / "cache"}


NO_JINJA = "{{ bos_token }}\n{% for m in messages %}{{ m"
RECURSIVE = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
LAST_TURN = "{% for m in messages %}{% if loop.last %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
NO_TOKENIZER = "no tokenizer can be loaded from "
WORDY = '{"model_type": "gemma3_text", "hidden_size": "w"}'
WIDER = json.dumps({"model_type": "gemma3_text", **TINY, "intermediate_size": 96})

LEAVING_NOTHING = [
    (2, {"batch_size": 9, "accumulate": 2}, "data.batch_size 9 is the global batch and must divide"),
    (2, {"max_steps": 6, "warmup_steps": 100}, "optim.warmup_steps 100 must be less than the run's steps, 6"),
    (2, {"max_text_tokens": 10_000}, "knows 256 positions: set data.max_text_tokens to 248 or less, or"),
    (2, lambda home: {"text_dir": f"{home}/run/"}, "/run/ is run.output; name a folder inside it"),
    (2, lambda home: {"cache": home, "output": f"{home}/run"}, "/run lies in the cache"),
    (2, lambda home: {"cache": described_cache(home / "it", 16), "text_dir": f"{home}/it/text"}, "lies in the cache"),
    (2, lambda home: {"cache": ["a", "b"], "output": "b/run"}, "b/run lies in the cache b"),
    (2, {"posterior": "sample"}, "data.posterior: sample needs posterior moments, and "),
    (2, {"cache": "ftp://bucket/cache"}, "ftp://bucket/cache has an unsupported scheme"),
    (
        2,
        lambda home: {"cache": make_cache(home / "it", np.ones((9, 8), np.float32))},
        "holds [feature 8] for each image",
    ),
    (1, lambda home: {"cache": described_cache(home / "cache", 16, seal=False)}, "is not sealed"),
    (1, cut_cache, "is damaged"),
    (2, {"language_model": "a/b/c"}, "model.language_model: no folder a/b/c"),
    (1, {"language_model": "nobody/nothing"}, "; download it where there is a network and name its folder, or "),
    (1, partial(changed_model, file="*token*", text=None), ": the folder has no tokenizer files"),
    *((1, partial(changed_model, file="tokenizer.json", text=text), NO_TOKENIZER) for text in ("[1]", "{}")),
    (1, partial(changed_model, file="tokenizer_config.json", text="[1]"), NO_TOKENIZER),
    (2, partial(changed_model, file="chat_template.jinja", text=None), "name a Jinja file in model.chat_template"),
    (2, partial(changed_model, file="chat_template.jinja", text=NO_JINJA), "/lm' is broken in line 2: unexpected"),
    (2, partial(template_file, template=NO_JINJA), "/chat.jinja is broken in line 2: unexpected end of template"),
    *((1, partial(changed_model, file="config.json", text=text), "/lm' cannot be loaded: ") for text in ("[]", WORDY)),
    (1, partial(changed_model, file="config.json", text='{"model_type": "t5"}'), "/lm' is an encoder-decoder (t5); "),
    (1, partial(changed_model, file="*", text=None), "/lm' cannot be loaded: Unrecognized model in "),
    (1, partial(changed_model, file="config.json", text=WIDER), "/lm' cannot be loaded: "),
    (1, partial(changed_model, file="model.safetensors", text="\x10\0\0\0\0\0\0\0not a header...."), "/lm"),
    (1, partial(changed_model, file="model.safetensors", text=None), "/lm"),
    (1, {"max_text_tokens": 5}, "none of its 37 samples has words of the assistant in data.max_text_tokens 5; "),
    (1, partial(template_file, template="{{ raise_exception('no') }}"), "refuses it: no; the same for every sample"),
    (1, partial(template_file, template="{{ 1 // 0 }}"), "refuses it: integer division or modulo by zero; the same"),
    (1, partial(template_file, template="{{ messages + 1 }}"), "refuses it: can only concatenate list"),
    (1, partial(template_file, template="{{ '{a}'.format() }}"), "refuses it: KeyError 'a'; the same for every sample"),
    (1, partial(template_file, template=RECURSIVE), "refuses it: maximum recursion depth exceeded"),
    (1, partial(template_file, template="{{ 'a' * 10**14 }}"), "refuses it: MemoryError; the same for every sample"),
    (2, partial(template_file, template="{{ 'a' * 10**7 }}"), "chat.jinja turns one word into more than 1,000,000 ch"),
    (2, partial(template_file, template=LAST_TURN), "; set model.chat_template to one that only appends"),
]

LEAVING_ITS_TEXT = [
    (2, {"epochs": 1, "warmup_steps": 4}, "warmup_steps 4 must be less than the run's steps, 4; set it lower, or to"),
    (1, {"val_fraction": 0.99999999}, "37 are held out; raise it, or lower data.val_fraction 0.99999999"),
    (1, lambda home: {"language_model": save_language_model(home / "lm", vocab_size=9)}, "the model embeds 9 tokens"),
]


@pytest.mark.parametrize(("code", "change", "message"), LEAVING_NOTHING + LEAVING_ITS_TEXT)
def test_an_impossible_run_is_one_message(configured, refusal, tmp_path, code, change, message):
    changes = change(tmp_path) if callable(change) else change
    before = sorted(tmp_path.rglob("*"))
    error = refusal(code, configured(**changes))
    assert message in error
    assert sum(line.startswith("trainer: ") for line in error.splitlines()) == 1
    if (code, change, message) in LEAVING_NOTHING:
        assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_model_is_one_message_without_a_network(configured, refusal, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (line,) = refusal(1, configured(language_model="nolm")).splitlines()
    assert (
        "model.language_model 'nolm' is not a folder here and not in the Hub's local cache, and the Hub cannot" in line
    )


@pytest.mark.parametrize(
    ("option", "paths", "message"),
    [
        ("cache", ["nothing", "file", "file/deeper", "folder"], "{path} holds no cache"),
        ("model.language_model", ["nothing", "file", "file/deeper"], "model.language_model: no folder {path}"),
        ("model.chat_template", ["nothing", "file/deeper", "folder", "/dev/zero"], "chat_template cannot be read"),
        ("data.text_dir", ["file", "file/deeper"], "name another data.text_dir"),
        ("run.output", ["file", "file/deeper"], "run.output: {file} is not a folder"),
        ("run.resume", ["nothing", "file", "file/deeper", "folder"], "{path} is not a checkpoint"),
    ],
)
def test_a_path_to_another_kind_of_file_is_wrong_usage(configured, refusal, tmp_path, option, paths, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in paths:
        error = refusal(2, configured(), "train", f"--{option}={tmp_path / path}")
        assert message.format(path=tmp_path / path, file=tmp_path / "file") in error
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder"]


def find_no_compiler() -> None:
    from torch._inductor import config

    config.cpp.cxx = (None, "/nowhere/g++")


def test_a_host_without_a_compiler_is_told_before_the_first_step(configured, tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    code, error = ForkedTrainer(command(configured(compile="whole")), environment, find_no_compiler).end()
    assert code == 2
    assert "trainer: error: run.compile: torch.compile does not work here" in error
    assert not (tmp_path / "run").exists()


def test_missing_fields_are_listed(capsys):
    assert main(["train"]) == 2
    needed = "missing: cache or caches or data.views, model.language_model, run.output\n"
    assert needed in capsys.readouterr().err


WRONG_VALUES = {
    "run.epochs": ([0, 1e300, ".nan"], "must be above 0 and at most 1,000,000"),
    "run.max_steps": ([0, 10**20], "must be in [1, 1,000,000,000] or null"),
    "run.eval_batch_size": ([10**20], "must be in [1, 1,000,000]"),
    "run.save_every": ([0], "must be at least 1"),
    "data.accumulate": ([10**20], "must be in [1, data.batch_size 8]"),
    "data.max_text_tokens": ([10**20], "must be in [2, 1,048,576]"),
    "data.val_fraction": ([1.5, ".nan"], "must be in [0, 1]"),
    "data.seed": ([10**20], "must be in [0, 2^63)"),
    "data.batch_size": ([10**20], "must be in [1, 1,000,000]"),
    "data.shuffle_block": ([0, 10**20], "must be in [1, 65,536]"),
    "data.cache_bytes": ([0, 10], "must be at least 1,310,720"),
    "optim.lr": ([1e300, 1e38, ".nan"], "must be above 0 and at most 1000"),
    "optim.weight_decay": ([1e300, ".inf"], "must be in [0, 1000]"),
    "optim.warmup_steps": ([-1], "must be at least 0 or null"),
    "optim.max_grad_norm": ([".inf", ".nan"], "must be above 0 and finite, or null"),
    "optim.momentum": ([1], ""),
    "model.layout": (["diagonal"], ""),
}


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_a_wrong_value_names_its_key(configured, refusal, key):
    values, message = WRONG_VALUES[key]
    for value in values:
        assert f"{key} {message}".strip() in refusal(2, configured(), "train", f"--{key}={value}")


OUTPUTS = [("train", "run.output"), ("train", "data.text_dir"), ("train", "data.cache_dir"), ("eval", "report")]


@pytest.mark.parametrize(("program", "key"), OUTPUTS)
def test_an_output_at_a_url_is_refused(configured, refusal, tmp_path, monkeypatch, program, key):
    monkeypatch.chdir(tmp_path)
    config, url = configured(), "s3://bucket/it"
    error = f"trainer: error: {key}: {url} is a URL; name a path on this machine\n"
    assert refusal(2, config, program, f"--{key}={url}") == error
    assert not (tmp_path / "s3:").exists()


@pytest.fixture(scope="module")
def one_step(configured_here: MakeConfig) -> Path:
    """The output of a run of one step."""
    config = configured_here("one-step", max_steps=1)
    assert main(command(config)) == 0
    return config.run.folder


MUST_MATCH = {
    "data.batch_size": {"batch_size": 4},
    "data.seed": {"seed": 5},
    "data.shuffle_block": {"shuffle_block": 4},
    "data.val_fraction": {"val_fraction": 0.3},
    "model.layout": {"layout": "channel"},
    "model.projector": {"projector": "linear"},
    "tokenised text": {"max_text_tokens": 48},
    "language model": {},
}
"""Fields that decide the batches or the projector, and a change of each; the first three decide training alone."""


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_run_of_other_batches_or_another_projector_is_refused(field, configured, refusal, one_step, tmp_path):
    """An evaluation accepts other batches, even one that does not divide."""
    changes = {**MUST_MATCH[field], "text_dir": str(tmp_path / "text")}
    if field == "language model":
        changes["language_model"] = save_language_model(tmp_path / "other", rms_norm_eps=1e-5)
    error = refusal(1, configured(one_step, max_steps=2, **changes))
    assert named_fields(error) == {field}
    assert "to train anew: the same command with --run.output NEW" in error
    start = re.search(r"add --model.init_projector (.*)\n", error)
    assert (start is None) == (field in ("model.layout", "model.projector", "language model"))
    if start is not None:  # the advice works as it is written
        anew = configured(tmp_path / "new", max_steps=1, **{**changes, "text_dir": str(tmp_path / "new-text")})
        assert main([*command(anew), f"--model.init_projector={start[1]}"]) == 0
    assert "to resume from it, restore the settings that it was trained with" in error
    evaluation = configured(one_step, accumulate=3, **changes)
    if field in ("data.batch_size", "data.seed", "data.shuffle_block"):
        assert main(command(evaluation, "eval")) == 0
        return
    error = refusal(1, evaluation, "eval")
    assert named_fields(error) == {field}
    assert "train anew" not in error
    assert f"{one_step}/checkpoints/step-00000001/state.json holds its whole config" in error
    assert not (tmp_path / "text").exists()


def test_a_run_with_an_extended_cache_is_refused_with_a_remedy_and_evaluated(configured, refusal, tmp_path, capsys):
    cache = described_cache(tmp_path / "cache", 16, dtype="bfloat16")
    assert main(command(configured(cache=cache, max_steps=1))) == 0
    shutil.rmtree(cache)
    config = configured(cache=described_cache(cache, 24), max_steps=2)
    error = refusal(1, config)
    for words in ("cache identity", "the cache was extended", "--run.output NEW"):
        assert words in error
    assert main(command(config, "eval")) == 0
    assert "holds out of this one, by id as in training\n" in capsys.readouterr().out


def other_cache(path: Path, **changes: Any) -> Path:
    """Make a cache of ten samples like those of `cache_path`, in another form and dtype, with other encoder batches."""
    options = {"latents_mean": MEAN, "latents_std": STD, "batch_size": 2, **changes}
    latents = np.random.default_rng(1).standard_normal((10, 4, 3, 2), np.float32)
    return described_cache(path, 10, latents=latents, store_format="webdataset", **options)


def test_an_evaluation_on_another_cache_tells_its_samples(one_step, configured, refusal, tmp_path, capsys):
    other = {"cache": other_cache(tmp_path / "other"), "val_fraction": 1.0, "text_dir": None}
    assert main(command(configured(one_step, **other), "eval")) == 0
    shown = capsys.readouterr().out
    assert "samples: 10 held out\n" in shown
    assert "evaluating the 10 samples that data.val_fraction 1.0 holds out of this one" in shown
    assert "training held out 0.2: ids of both may have been trained on" in shown
    assert json.loads(shown.splitlines()[-1])["samples"] == 10
    assert "leaves no sample to train on" in refusal(1, configured(**other))
    inside = other["cache"] / "seal.json"
    assert f"report: {inside} lies in the cache" in refusal(2, configured(**other), "eval", f"--report={inside}")
    assert "holds no checkpoint" in refusal(2, configured(**other), "eval")
    assert "holds out 0 of 10 samples" in refusal(2, configured(one_step, **{**other, "val_fraction": 0.0}), "eval")
    rescaled = other_cache(tmp_path / "rescaled", latents_std=[2.0, 0.5, 3.0, 2.0])
    error = refusal(1, configured(one_step, cache=rescaled, text_dir=None), "eval")
    assert named_fields(error) == {"encoder.latents_std"}
    assert f"name samples such as those that {configured().cache} held, with --cache\n" in error
    assert not (tmp_path / "rescaled.text").exists()
    error = refusal(1, configured(one_step, cache=rescaled, max_steps=2))
    assert named_fields(error) == {"cache", "cache identity", "encoder.latents_std"}
    assert "model.init_projector" not in error, "it would be refused"
