import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.trainer.conftest import TINY, MakeConfig, described_cache, save_language_model
from tests.trainer.runs import ForkedTrainer, command, make_config, metrics
from trainer.cli import main


def test_train_then_eval_reports_own_and_shuffled_loss(configured, tmp_path, capsys):
    config = configured()
    assert main(command(config)) == 0
    assert "samples: 30 to train on, 7 held out" in capsys.readouterr().out
    report = tmp_path / "eval.json"
    assert main([*command(config, "eval"), f"--report={report}"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(report.read_text())
    assert printed["step"] == 12
    assert printed["own"] == pytest.approx(metrics(tmp_path / "run", "val_loss")[12], rel=1e-5)
    assert printed["shuffled"] == pytest.approx(metrics(tmp_path / "run", "val_loss_shuffled")[12], rel=1e-5)
    assert main([*command(config, "eval"), f"--checkpoint={tmp_path}/run/checkpoints/step-00000005"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 5


def test_a_yaml_file_and_the_command_line_are_one_config(cache_path, language_model, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(
        f"cache: {cache_path}\nmodel: {{language_model: {language_model}, projector: linear}}\n"
        f"data: {{max_text_tokens: 64}}\nrun: {{output: {tmp_path}/yaml, precision: fp32}}\n"
    )
    assert main(["train", f"--config={file}", "--run.max_steps=2", "--data.val_fraction=0"]) == 0
    resolved = (tmp_path / "yaml" / "config.yaml").read_text()
    assert "max_steps: 2" in resolved
    assert "projector: linear" in resolved
    assert main(["train", f"--config={tmp_path}/yaml/config.yaml"]) == 0
    assert "going on after step 2 of 2" in capsys.readouterr().out


def test_a_batch_larger_than_the_samples_to_train_on_is_said(configured, capsys):
    assert main([*command(configured()), "--data.batch_size=32", "--run.max_steps=1"]) == 0
    assert "data.batch_size 32 is more than that" in capsys.readouterr().out


def find_no_compiler() -> None:
    from torch._inductor import config

    config.cpp.cxx = (None, "/nowhere/g++")


def test_a_host_without_a_compiler_is_told_before_the_first_step(configured, tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    code, error = ForkedTrainer(command(configured(compile=True)), environment, find_no_compiler).end()
    assert code == 2
    assert "trainer: error: run.compile: torch.compile does not work here" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_model_the_hub_cannot_give_is_one_line_with_remedies(configured):
    code, error = ForkedTrainer(command(configured(language_model="nobody/nothing")), {}).end()
    assert code == 1
    (line,) = error.splitlines()
    assert line.startswith("trainer: error: no tokenizer can be loaded from 'nobody/nothing': ")
    assert line.endswith("name its folder, or copy the Hub's cache and set HF_HUB_OFFLINE=1")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"batch_size": 9, "accumulate": 2}, 2, "data.batch_size 9 is the global batch and must divide"),
        ({"max_steps": 6, "warmup_steps": 100}, 2, "optim.warmup_steps 100 must be less than the run's steps, 6"),
        (
            {"epochs": 1, "warmup_steps": 4},
            2,
            "warmup_steps 4 must be less than the run's steps, 4; set it lower, or to",
        ),
        ({"max_text_tokens": 5}, 1, "none of its 37 samples has an assistant's words within data.max_text_tokens 5; "),
        ({"val_fraction": 0.99999999}, 1, "37 are held out; raise it, or lower data.val_fraction 0.99999999"),
    ],
)
def test_a_config_that_cannot_run_is_one_line(configured, refusal, changes, code, message):
    error = refusal(code, configured(**changes))
    assert message in error
    assert [line for line in error.splitlines() if line.startswith("trainer: ")] == [error.splitlines()[-1]]


@pytest.mark.parametrize(
    ("option", "paths", "message"),
    [
        ("cache", ["nothing", "file", "file/deeper", "folder"], "{path} holds no cache"),
        ("model.language_model", ["nothing", "file", "file/deeper"], "model.language_model: no folder {path}"),
        ("model.chat_template", ["nothing", "file/deeper", "folder"], "model.chat_template cannot be read"),
        ("data.text_dir", ["file", "file/deeper"], "name another data.text_dir"),
        ("run.output", ["file", "file/deeper"], "run.output: {file} is not a folder"),
        ("run.resume", ["nothing", "file", "file/deeper", "folder"], "{path} is no checkpoint"),
        ("checkpoint", ["nothing", "file", "file/deeper", "folder"], "{path} is no checkpoint"),
    ],
)
def test_a_path_where_another_kind_of_thing_is_is_wrong_usage(configured, refusal, tmp_path, option, paths, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    program = "eval" if option == "checkpoint" else "train"
    for path in paths:
        error = refusal(2, configured(), program, f"--{option}={tmp_path / path}")
        assert message.format(path=tmp_path / path, file=tmp_path / "file") in error
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize("place", [{}, {"text_dir": None}], ids=["in a folder", "beside the cache"])
def test_texts_too_long_are_refused_before_any_is_made(configured, refusal, tmp_path, place):
    cache = described_cache(tmp_path / "cache", 16)
    assert "10000 make 10006" in refusal(2, configured(cache=cache, max_text_tokens=10_000, **place))
    assert list(tmp_path.iterdir()) == [cache]


@pytest.mark.parametrize(("shape", "named"), [((12,), "feature 12"), ((3, 8), "token 3, feature 8")])
def test_a_cache_of_no_vae_is_refused_in_one_line(configured, refusal, tmp_path, shape, named):
    cache = make_cache(tmp_path / "cache", np.ones((12, *shape), np.float32))
    (line,) = refusal(2, configured(cache=cache)).splitlines()
    assert line.startswith(
        f"trainer: error: cache: {cache} holds [{named}] for each image; the projector reads latents"
    )


HUGE = "100000000000000000000"

WRONG_VALUES = [
    ("run.epochs", ["0", "1e300", ".nan"], " must be above 0 and at most 1,000,000"),
    ("run.max_steps", ["0", HUGE], " must be in [1, 1,000,000,000] or null"),
    ("run.eval_batch_size", [HUGE], " must be in [1, 1,000,000]"),
    ("run.save_every", ["0"], " must be at least 1"),
    ("data.accumulate", [HUGE], " must be in [1, data.batch_size 8]"),
    ("data.max_text_tokens", [HUGE], " must be in [2, 1,048,576]"),
    ("data.val_fraction", [".nan", "1.5"], " must be in [0, 1]"),
    ("data.seed", [HUGE], " must be in [0, 2^63)"),
    ("data.batch_size", [HUGE], " must be in [1, 1,000,000]"),
    ("optim.lr", ["1e300", "1e38", ".nan"], " must be above 0 and at most 1000"),
    ("optim.weight_decay", [".inf", "1e300"], " must be in [0, 1000]"),
    ("optim.warmup_steps", ["-1"], " must be at least 0 or null"),
    ("optim.max_grad_norm", [".inf", ".nan"], " must be above 0 and finite, or null"),
    ("optim.lr", ["fast"], ""),
    ("optim.momentum", ["1"], ""),
    ("model.layout", ["diagonal"], ""),
]


@pytest.mark.parametrize(("key", "values", "message"), WRONG_VALUES)
def test_a_wrong_value_names_its_key(key, values, message, capsys):
    for value in values:
        assert main(["train", "--cache=c", "--model.language_model=m", "--run.output=o", f"--{key}={value}"]) == 2
        error = capsys.readouterr().err
        assert f"{key}{message}" in error
        assert "Traceback" not in error


def test_nothing_is_written_into_the_cache(cache_path, configured, refusal):
    before = sorted(cache_path.rglob("*"))
    inside = cache_path / "seal.json"
    for config in (configured(inside), configured(text_dir=str(cache_path / "text"))):
        assert "lies in the cache" in refusal(2, config)
    assert f"report: {inside} lies in the cache" in refusal(2, configured(), "eval", f"--report={inside}")
    assert sorted(cache_path.rglob("*")) == before


def test_a_path_may_begin_at_home(cache_path, language_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lm").symlink_to(language_model)
    config = make_config(cache_path, "~/lm", Path("~/run"), max_steps=1, text_dir="~/text")
    assert main(command(config)) == 0
    arguments = ["--checkpoint=~/run/checkpoints/step-00000001", "--report=~/eval.json"]
    assert main([*command(config, "eval"), *arguments]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.json", "lm", "run", "text"]


def test_a_tokenizer_of_more_tokens_than_embedded_is_refused(configured, refusal, tmp_path):
    model = save_language_model(tmp_path / "lm", vocab_size=10)
    error = refusal(1, configured(language_model=model))
    assert "and the model embeds 10 tokens; the two do not belong together" in error


WIDER = json.dumps({"model_type": "gemma3_text", **TINY, "intermediate_size": 96})


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model_type": "gemma3_text", "hidden_size": "wide"}'),
        ("config.json", '{"model_type": "gemma3_text", "layer_types": ["none"]}'),
        ("config.json", WIDER),
        ("model.safetensors", "\x10\0\0\0\0\0\0\0not a header...."),
        ("model.safetensors", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[1]"),
        ("tokenizer_config.json", "[1]"),
    ],
)
def test_a_model_folder_with_a_broken_file_is_one_line(configured, refusal, language_model, tmp_path, file, text):
    broken = shutil.copytree(language_model, tmp_path / "lm")
    (broken / file).unlink()
    if text is not None:
        (broken / file).write_text(text)
    line = refusal(1, configured(language_model=broken)).strip().splitlines()[-1]
    assert line.startswith("trainer: error: ")
    assert str(broken) in line


def test_evaluation_without_checkpoint_or_samples_is_refused(configured, refusal):
    config = configured(val_fraction=0.0, max_steps=1)
    assert "holds no checkpoint" in refusal(2, config, "eval")
    assert main(command(config)) == 0
    assert "holds out 0 of 37 samples" in refusal(2, config, "eval")


@pytest.fixture(scope="module")
def one_step(configured_here: MakeConfig) -> Path:
    """The output of a run of one step."""
    config = configured_here("one-step", max_steps=1)
    assert main(command(config)) == 0
    return config.run.folder


def named_fields(error: str) -> set[str]:
    """Of the table in a message: what stands before two spaces in each of its rows."""
    rows = [line.strip().split("  ") for line in error.splitlines() if line.startswith("  ")]
    return {row[0] for row in rows if len(row) > 1} - {"field"}


MUST_MATCH = {
    "data.batch_size": {"batch_size": 4},
    "data.seed": {"seed": 5},
    "data.val_fraction": {"val_fraction": 0.3},
    "model.layout": {"layout": "channel"},
    "model.projector": {"projector": "linear"},
    "tokenised text": {"max_text_tokens": 48},
    "language model": {},
}
"""What decides the batches or the projector, and a change of it; the first two decide training alone."""


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_run_of_other_batches_or_another_projector_is_refused(field, configured, refusal, one_step, tmp_path):
    changes = {**MUST_MATCH[field], "text_dir": str(tmp_path / "text")}
    if field == "language model":
        changes["language_model"] = save_language_model(tmp_path / "other", rms_norm_eps=1e-5)
    error = refusal(1, configured(one_step, max_steps=2, **changes))
    assert named_fields(error) == {field}
    assert "to train anew: the same command with --run.output NEW" in error
    assert "to go on from here, restore what it was trained with" in error
    assert not (tmp_path / "text").exists()
    evaluation = configured(one_step, **changes)
    if field in ("data.batch_size", "data.seed"):
        assert main(command(evaluation, "eval")) == 0
        return
    error = refusal(1, evaluation, "eval")
    assert named_fields(error) == {field}
    assert "train anew" not in error
    assert f"{one_step}/checkpoints/step-00000001/state.json holds its whole config" in error
    assert not (tmp_path / "text").exists()


def test_an_evaluation_minds_no_batch_that_does_not_divide(one_step, configured, refusal, capsys):
    config = configured(one_step, max_steps=2, batch_size=32, accumulate=5)
    assert "must divide by" in refusal(2, config)
    assert main(command(config, "eval")) == 0
    assert "every batch holds samples twice" not in capsys.readouterr().out


def test_a_run_whose_cache_was_extended_is_told_what_to_do(configured, refusal, tmp_path, capsys):
    cache = described_cache(tmp_path / "cache", 16)
    assert main(command(configured(cache=cache, max_steps=1))) == 0
    texts = sorted((tmp_path / "text").iterdir())
    shutil.rmtree(cache)
    described_cache(cache, 24)
    config = configured(cache=cache, max_steps=2)
    error = refusal(1, config)
    for words in ("cache identity", "the cache was extended", "--run.output NEW"):
        assert words in error
    assert sorted((tmp_path / "text").iterdir()) == texts
    assert main(command(config, "eval")) == 0
    assert "holds out, by id as in training\n" in capsys.readouterr().out


def other_cache(path: Path, **changes: Any) -> Path:
    """Ten samples like those of `cache_path`, in another form and dtype, with other encoder batches."""
    options = {"latents_mean": [0.5, -1.0, 2.0, 0.0], "latents_std": [2.0, 0.5, 3.0, 1.0], "batch_size": 2, **changes}
    latents = np.random.default_rng(1).standard_normal((10, 4, 3, 2), np.float32)
    return described_cache(path, 10, latents=latents, store_format="webdataset", **options)


def test_an_evaluation_on_another_cache_says_what_it_evaluates(one_step, configured, refusal, tmp_path, capsys):
    other = {"cache": other_cache(tmp_path / "other"), "val_fraction": 1.0, "text_dir": None}
    assert main(command(configured(one_step, **other), "eval")) == 0
    said = capsys.readouterr().out
    assert "of this one, the 10 samples are evaluated that data.val_fraction 1.0 holds out" in said
    assert "training held out 0.2: ids of both may have been trained on" in said
    assert json.loads(said.splitlines()[-1])["samples"] == 10
    assert "leaves no sample to train on" in refusal(1, configured(**other))


def test_an_evaluation_on_latents_of_another_encoder_is_refused(one_step, configured, refusal, tmp_path):
    other = other_cache(tmp_path / "other", latents_std=[2.0, 0.5, 3.0, 2.0])
    error = refusal(1, configured(one_step, cache=other, text_dir=None), "eval")
    assert named_fields(error) == {"encoder.latents_std"}
    assert not (tmp_path / "other.text").exists()


def test_an_unsealed_or_damaged_cache_is_refused(configured, refusal, tmp_path):
    unsealed = described_cache(tmp_path / "unsealed", 16, seal=False)
    assert "is not sealed" in refusal(1, configured(cache=unsealed))
    damaged = described_cache(tmp_path / "damaged", 16)
    (shard,) = damaged.glob("latents/c/1/0/0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    error = refusal(1, configured(cache=damaged))
    assert "is damaged" in error
    assert "shard 1" in error
