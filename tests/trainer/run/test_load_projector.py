"""A trained projector is used without its run: its file describes everything that is needed."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cache_store.errors import CacheError, ConfigError, EncodeOnceError, NewerFormatError
from tests.named import assert_names
from tests.trainer.conftest import GEMMA_TEMPLATE, MEAN, MakeConfig, described_cache, save_language_model
from tests.trainer.runs import damages, metrics, named_fields, open_alone, train_alone
from trainer import load_projector
from trainer.config import TrainConfig
from trainer.data.draws import as_tensor
from trainer.model.projector_file import CONFIG_FILE, METADATA_KEY, PROJECTOR_FILE
from trainer.run.checkpoint import restore_projectors
from trainer.run.folder import checkpoints_of


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig) -> TrainConfig:
    """A run of two steps, with a checkpoint of each."""
    return train_alone(configured_here("trained", max_steps=2, save_every=1))


@pytest.mark.parametrize(("layout", "shape"), [("spatial", "mlp"), ("channel", "linear"), ("channel", "mlp_gelu")])
def test_a_projector_is_loaded_without_its_run(configured, layout, shape, tmp_path):
    """Its file alone tells what it was trained on and for; `config.json` repeats that."""
    config = train_alone(configured(max_steps=1, layout=layout, projector=shape, precision="bf16"))
    session = open_alone(config)
    restore_projectors(config.run.folder, session.model.projectors)
    latents = as_tensor(session.cache.first.read(np.arange(5)))
    projector = load_projector(shutil.copy(config.run.folder / PROJECTOR_FILE, tmp_path / "alone"))
    # A matrix that needs a gradient may be multiplied by another kernel.
    assert torch.equal(projector(latents), session.model.projectors.requires_grad_(False)({"world": latents}))
    for wrong, shown in [(latents[0], r"\[4, 3, 2\]"), (latents.numpy(), r"\[5, 4, 3, 2\]")]:
        with pytest.raises(ConfigError, match=rf"\[N, 4, 3, 2\].* world.*{shown}$"):
            projector(wrong)
    assert not any(each.requires_grad for each in projector.parameters())
    described = json.loads((config.run.folder / CONFIG_FILE).read_text())
    assert described == json.loads(msgspec.json.encode(projector.config))
    (tower,), language = described["towers"], session.must_match.model["language model"]
    assert (tower["name"], tower["projector"], tower["layout"], tower["ends"]) == ("world", shape, layout, True)
    assert (tower["tokens"], tower["features"]) == {"spatial": (8, 4), "channel": (6, 6)}[layout]
    assert described["language_model"].items() >= {"identity": language, "width": 32, "precision": "bf16"}.items()
    text = {"begins_with_bos": True, "chat_template": GEMMA_TEMPLATE, "end_of_turn": "<end_of_turn>"}
    training = {"steps": 1, "samples": 8, "val_fraction": 0.2, "started_from": None}
    assert (described["text"], described["training"]) == (text, training)


def test_the_newest_checkpoint_is_loaded_or_the_one_named(trained, tmp_path):
    run, checkpoints = trained.run.folder, checkpoints_of(trained.run)
    places = [run, str(checkpoints.path(2)), run / PROJECTOR_FILE, checkpoints.path(1)]
    assert [load_projector(place).config.training.steps for place in places] == [2, 2, 2, 1]
    for name in (CONFIG_FILE, PROJECTOR_FILE):
        shutil.copy(run / name, tmp_path / name)
    assert load_projector(tmp_path).config.training.steps == 2
    damaged = shutil.copytree(run, tmp_path / "damaged")
    for _ in damages(checkpoints_of(replace(trained.run, output=str(damaged))).path(2) / PROJECTOR_FILE):
        with pytest.raises(CacheError, match=PROJECTOR_FILE):
            load_projector(damaged)


def test_a_place_or_file_without_a_projector_is_one_message(trained, tmp_path):
    for place in (tmp_path / "nothing", tmp_path, trained.run.folder / "config.yaml"):
        with pytest.raises(EncodeOnceError, match=str(place)):
            load_projector(place)
    file = Path(shutil.copy(trained.run.folder / PROJECTOR_FILE, tmp_path))
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        own = json.loads(opened.metadata()[METADATA_KEY])
    tower = own["towers"][0]
    without = {name: tensor for name, tensor in tensors.items() if name != "world.ends"}
    cases = [
        (tensors, None, ConfigError, ""),
        (tensors, {**own, "format_version": 2, "more": 1}, NewerFormatError, "version 2"),
        (tensors, {**own, "towers": [tower, tower]}, CacheError, "towers"),
        (tensors, {**own, "towers": [{**tower, "projector": "qformer"}]}, CacheError, "qformer"),
        (without, own, CacheError, "world.ends float32 (2, 32)"),
        ({**tensors, "world.ends": torch.zeros(2, 32).half()}, own, CacheError, "world.ends float16 (2, 32)"),
        (tensors, {**own, "language_model": {**own["language_model"], "width": 2**20}}, CacheError, "float32"),
    ]
    for changed, config, error, names in cases:
        save_file(changed, file, {METADATA_KEY: json.dumps(config)} if config else None)
        with pytest.raises(error) as refused:
            load_projector(file)
        assert_names(refused.value, f"{file} {names}")


def started_from(run: Path) -> str | None:
    return load_projector(run).config.training.started_from


def test_a_run_starts_where_a_trained_projector_ended(trained, configured, capsys):
    """It starts with the losses and statistics of that projector, but resumes from its own checkpoint."""
    run, ended = trained.run.folder, metrics(trained.run.folder, "val_loss")[2]
    first = train_alone(configured("first", init_projector=str(run), max_steps=1, lr=1e-12))
    newest = checkpoints_of(trained.run).path(2) / PROJECTOR_FILE
    assert_names(capsys.readouterr().out, f"{newest} 2")
    assert metrics(first.run.folder, "val_loss")[1] == pytest.approx(ended, rel=1e-6)
    assert started_from(first.run.folder) == hashlib.sha256(newest.read_bytes()).hexdigest()
    assert started_from(run) is None
    train_alone(configured("first", init_projector=str(run / "gone"), max_steps=2, val_fraction=0.2))
    assert_names(capsys.readouterr().out, f"model.init_projector: {run} {run}/gone")
    assert started_from(first.run.folder) == hashlib.sha256(newest.read_bytes()).hexdigest()


@pytest.mark.parametrize("field", ["model.layout", "language model", "encoder.latents_std"])
def test_a_projector_that_does_not_fit_starts_no_run(trained, configured, refusal, tmp_path, field):
    """Before any text is tokenised."""
    changes = {"layout": "channel"} if field == "model.layout" else {}
    if field == "language model":
        changes = {"language_model": save_language_model(tmp_path / "lm", rms_norm_eps=1e-5)}
    if field == "encoder.latents_std":
        latents = np.random.default_rng(0).standard_normal((9, 4, 3, 2), np.float32)
        options = {"latents_mean": MEAN, "latents_std": (2.0, 0.5, 3.0, 2.0)}
        changes = {"cache": described_cache(tmp_path / "cache", 9, latents=latents, **options)}
    error = refusal(1, configured(init_projector=str(trained.run.folder), **changes))
    assert_names(error, f"model.init_projector {trained.run.folder}")
    assert named_fields(error) == {field}
    assert not (tmp_path / "text").exists()
    refusal(2, configured(init_projector=str(tmp_path / "none")), names=f"model.init_projector: {tmp_path}/none")
