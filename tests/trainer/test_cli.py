"""The commands `train` and `eval`: their output, their files, and their refusals before they write."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from tests.make_cache import make_cache
from tests.named import assert_names
from tests.trainer.conftest import (
    GEMMA_TEMPLATE,
    MEAN,
    STD,
    TINY,
    MakeConfig,
    described_cache,
    make_tokenizer,
    save_language_model,
)
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
    assert_names(shown, "30 7")
    resolved = f"--config={tmp_path}/run/config.yaml"
    assert main(["train", resolved]) == 0
    assert "resuming after step 2 of 2" in capsys.readouterr().out
    assert main(["eval", resolved]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["step"] == 2
    assert printed["own"] == pytest.approx(metrics(tmp_path / "run", "val_loss")[2], rel=1e-5)
    assert printed["shuffled"] == pytest.approx(metrics(tmp_path / "run", "val_loss_shuffled")[2], rel=1e-5)
    assert main(["eval", resolved, "--checkpoint=~/run/checkpoints/step-00000001"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"lm", "run", "text", "train.yaml"}


def changed_model(home: Path, file: str, text: str | None) -> dict[str, Path]:
    """Save a model with one file changed to this text, or deleted."""
    for path in save_language_model(home / "lm").glob(file):
        path.unlink() if text is None else path.write_text(text)
    return {"language_model": home / "lm"}


def template_file(home: Path, template: str) -> dict[str, str]:
    (home / "chat.jinja").write_text(template)
    return {"chat_template": str(home / "chat.jinja")}


def cut_cache(home: Path) -> dict[str, Path]:
    (shard,) = described_cache(home / "cache", 16).glob("latents/16x16/c/1/0/0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    return {"cache": home / "cache"}


def two_sizes(home: Path) -> Path:
    return make_cache(home / "it", [np.ones((9, 4, *cells), np.float32) for cells in ((2, 2), (1, 3))])


def two_plans(home: Path, form: type) -> dict[str, object]:
    """Save caches of two plans, as views or as towers."""
    caches = {name: str(described_cache(home / name, rows)) for name, rows in (("first", 16), ("second", 12))}
    return {"cache": caches if form is dict else [*caches.values()]}


NO_JINJA = "{{ bos_token }}\n{% for m in messages %}{{ m"
LAST_TURN = "{% for m in messages %}{% if loop.last %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
FAILING = ("{{ raise_exception('no') }}", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
WIDER = json.dumps({"model_type": "gemma3_text", **TINY, "intermediate_size": 96})

LEAVING_NOTHING: list[tuple[int, Any, str]] = [
    (2, {"batch_size": 9, "accumulate": 2}, "data.batch_size 9"),
    (2, {"max_steps": 6, "warmup_steps": 100}, "optim.warmup_steps 100"),
    (2, {"max_text_tokens": 10_000}, "256 data.max_text_tokens 248"),
    (2, lambda home: {"text_dir": f"{home}/run/"}, "/run/ run.output"),
    (2, lambda home: {"cache": described_cache(home / "it", 16), "text_dir": f"{home}/it/text"}, "/it/text"),
    (2, lambda home: {"cache": ["a", "b"], "output": "b/run"}, "b/run"),
    (2, {"posterior": "sample"}, "data.posterior"),
    (2, lambda home: {"cache": make_cache(home / "it", np.ones((9, 8), np.float32))}, "[feature 8] LatentStream"),
    (2, lambda home: {"cache": two_sizes(home), "layout": "channel", "language_model": "none"}, "model.layout spatial"),
    *((1, partial(two_plans, form=form), "/first /second") for form in (list, dict)),
    (1, lambda home: {"cache": described_cache(home / "it", 16, seal=False)}, "/it"),
    (1, cut_cache, "/cache"),
    (1, {"language_model": "nobody/nothing"}, "nobody/nothing"),
    (1, {"max_text_tokens": 5}, "data.max_text_tokens 5 37"),
    *((1, partial(changed_model, file=name, text="[1]"), "/lm") for name in ("tokenizer.json", "config.json")),
    (1, partial(changed_model, file="config.json", text=WIDER), "/lm"),
    *((1, partial(changed_model, file=file, text=None), "/lm") for file in ("*token*", "model.safetensors")),
    (1, partial(changed_model, file="model.safetensors", text="\x10\0\0\0\0\0\0\0not a header...."), "/lm"),
    (2, partial(changed_model, file="chat_template.jinja", text=None), "model.chat_template"),
    (2, partial(changed_model, file="chat_template.jinja", text=NO_JINJA), "/lm line 2"),
    (2, partial(template_file, template=NO_JINJA), "/chat.jinja line 2"),
    *((1, partial(template_file, template=template), "sample-000000") for template in FAILING),
    (2, partial(template_file, template=LAST_TURN), "model.chat_template"),
]

LEAVING_ITS_TEXT: list[tuple[int, Any, str]] = [
    (2, {"epochs": 1, "warmup_steps": 4}, "optim.warmup_steps 4"),
    (1, {"val_fraction": 0.99999999}, "data.val_fraction 0.99999999 37"),
    (1, lambda home: {"language_model": save_language_model(home / "lm", vocab_size=9)}, "9"),
]


@pytest.mark.parametrize(("code", "change", "names"), LEAVING_NOTHING + LEAVING_ITS_TEXT)
def test_an_impossible_run_is_one_message(configured, refusal, tmp_path, monkeypatch, code, change, names):
    """The Hub is not reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    changes = change(tmp_path) if callable(change) else change
    before = sorted(tmp_path.rglob("*"))
    error = refusal(code, configured(**changes), names=names)
    assert sum(line.startswith("trainer: ") for line in error.splitlines()) == 1
    if (code, change, names) in LEAVING_NOTHING:
        assert sorted(tmp_path.rglob("*")) == before


def find_no_compiler() -> None:
    from torch._inductor import config

    config.cpp.cxx = (None, "/nowhere/g++")


@pytest.mark.slow
def test_a_host_without_a_compiler_is_told_before_the_first_step(configured, tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    code, error = ForkedTrainer(command(configured(compile="whole")), environment, find_no_compiler).end()
    assert (code, "run.compile" in error) == (2, True), error
    assert not (tmp_path / "run").exists()


WRONG_VALUES: dict[str, list[object]] = {
    "run.epochs": [0, ".nan"],
    "run.report_to": ["[pigeon]"],
    "data.text_dir": ["file/deeper", "s3://bucket/it"],
    "optim.max_grad_norm": [".inf"],
    "model.language_model": ["./nothing", "a/b/c"],
    "model.chat_template": ["nothing", "folder"],
    "run.output": ["file"],
    "cache": ["nothing", "file/deeper", "folder"],
}


def test_a_wrong_value_names_its_key_and_leaves_nothing(configured, refusal, tmp_path, monkeypatch):
    """Or, for a cache, the value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for key, values in WRONG_VALUES.items():
        for value in values:
            refusal(2, configured(), "train", f"--{key}={value}", names=str(value) if key == "cache" else key)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder"]


EXCLUDING = [
    (["--data.views=[a, b]"], "cache data.views"),
    (["--cache=null", "--data.views=[{world: a, siglip: b}, {world: b}]"], "views 2 siglip"),
    (["--run.parallel=fsdp2", "--run.fit_memory=true"], "run.fit_memory run.parallel"),
    (["--run.parallel=fsdp2", "--run.compile=whole"], "run.compile run.parallel"),
]


def test_options_that_exclude_each_other_and_missing_ones_are_named(configured, refusal, capsys):
    for options, names in EXCLUDING:
        refusal(2, configured(), "train", *options, names=names)
    assert main(["train"]) == 2
    assert_names(capsys.readouterr().err, "model.language_model run.output")


def test_a_tracker_that_is_not_installed_is_named(configured, refusal, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refusal(2, configured(report_to=["tensorboard", "wandb"]), names="run.report_to wandb `pip install wandb`")
    assert list(tmp_path.iterdir()) == []


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
    "data.max_text_tokens": {"max_text_tokens": 48},
    "chat template": {"chat_template": GEMMA_TEMPLATE.replace("{{ bos_token }}", "")},
    "tokenizer": {},
    "language model": {},
}
"""Fields that decide the batches or the projector, and a change of each; the first three decide training alone."""


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_run_of_other_batches_or_another_projector_is_refused(field, configured, refusal, one_step, tmp_path):
    """An evaluation accepts other batches, even one that does not divide."""
    changes = {**MUST_MATCH[field], "text_dir": str(tmp_path / "text")}
    if field == "language model":
        changes["language_model"] = save_language_model(tmp_path / "other", rms_norm_eps=1e-5)
    if field == "tokenizer":
        changes["language_model"] = shutil.copytree(configured(one_step).model.language_model, tmp_path / "other")
        (tokenizer := make_tokenizer()).add_tokens(["purple"])
        tokenizer.save_pretrained(tmp_path / "other")
    if field == "chat template":
        (tmp_path / "other.jinja").write_text(changes[field.replace(" ", "_")])
        changes["chat_template"] = str(tmp_path / "other.jinja")
    error = refusal(1, configured(one_step, max_steps=2, **changes))
    assert named_fields(error) == {field}
    assert_names(error, "--run.output")
    evaluation = configured(one_step, accumulate=3, **changes)
    if field in ("data.batch_size", "data.seed", "data.shuffle_block"):
        assert main(command(evaluation, "eval")) == 0
        return
    error = refusal(1, evaluation, "eval")
    assert named_fields(error) == {field}
    assert_names(error, f"{one_step}/checkpoints/step-00000001/state.json")
    assert not (tmp_path / "text").exists()


def test_a_run_with_an_extended_cache_is_refused_with_a_remedy_and_evaluated(configured, refusal, tmp_path, capsys):
    cache = described_cache(tmp_path / "cache", 16, dtype="bfloat16")
    assert main(command(configured(cache=cache, max_steps=1))) == 0
    shutil.rmtree(cache)
    config = configured(cache=described_cache(cache, 24), max_steps=2)
    refusal(1, config, names="identity extended --run.output")
    assert main(command(config, "eval")) == 0


def other_cache(path: Path, **changes: Any) -> Path:
    """Make a cache of ten samples like those of `cache_path`, in another form and dtype, with other encoder batches."""
    options = {"latents_mean": MEAN, "latents_std": STD, "batch_size": 2, **changes}
    latents = np.random.default_rng(1).standard_normal((10, 4, 3, 2), np.float32)
    return described_cache(path, 10, latents=latents, store_format="webdataset", **options)


def test_an_evaluation_on_another_cache_tells_its_samples(one_step, configured, refusal, tmp_path, capsys):
    other = {"cache": other_cache(tmp_path / "other"), "val_fraction": 1.0, "text_dir": None}
    assert main(command(configured(one_step, **other), "eval")) == 0
    shown = capsys.readouterr().out
    assert_names(shown, "data.val_fraction 1.0 0.2")
    assert json.loads(shown.splitlines()[-1])["samples"] == 10
    refusal(1, configured(**other), names="data.val_fraction 1.0")
    refusal(2, configured(**other), "eval", names=f"{tmp_path}/run")
    refusal(2, configured(one_step, **{**other, "val_fraction": 0.0}), "eval", names="data.val_fraction 0.0 10")
    rescaled = other_cache(tmp_path / "rescaled", latents_std=[2.0, 0.5, 3.0, 2.0])
    error = refusal(1, configured(one_step, cache=rescaled, text_dir=None), "eval")
    assert named_fields(error) == {"encoder.latents_std"}
    assert_names(error, f"{configured().cache} --cache")
    assert not (tmp_path / "rescaled.text").exists()
    error = refusal(1, configured(one_step, cache=rescaled, max_steps=2))
    assert named_fields(error) == {"cache", "cache identity", "encoder.latents_std", "texts of the samples"}
