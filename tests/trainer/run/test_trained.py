"""What a run leaves is used without it: the projector's file says all that has to be known."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cache_store import open_cache
from cache_store.errors import CacheError, ConfigError, EncodeOnceError, NewerFormatError
from tests.trainer.conftest import GEMMA_TEMPLATE, MakeConfig
from tests.trainer.runs import ALONE, damages, open_alone
from trainer import load_projector
from trainer.commands.train import train
from trainer.config import TrainConfig
from trainer.data.stream import as_tensor
from trainer.model.projector_file import CONFIG_FILE, METADATA_KEY, PROJECTOR_FILE
from trainer.run.checkpoint import restore_projector
from trainer.run.folder import checkpoints_of


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig) -> TrainConfig:
    """A run of two steps, with a checkpoint of each."""
    config = configured_here("trained", max_steps=2, save_every=1)
    train(config, ALONE)
    return config


@pytest.mark.parametrize("layout", ["spatial", "channel"])
@pytest.mark.parametrize("shape", ["linear", "mlp", "mlp_gelu"])
def test_a_projector_is_loaded_without_its_run(configured, layout, shape, tmp_path):
    """From its file alone, which says what it was trained on and for; `config.json` repeats it."""
    config = configured(max_steps=1, layout=layout, projector=shape, precision="bf16")
    train(config, ALONE)
    session = open_alone(config)
    restore_projector(config.run.folder, session.model.projector)
    latents = as_tensor(session.cache.read(np.arange(5)))
    projector = load_projector(shutil.copy(config.run.folder / PROJECTOR_FILE, tmp_path / "alone"))
    assert torch.equal(projector(latents), session.model.projector(latents))
    assert projector(latents).shape == (5, projector.config.tower.tokens, 32)
    assert not any(each.requires_grad for each in projector.parameters())
    said = json.loads((config.run.folder / CONFIG_FILE).read_text())
    assert said == json.loads(msgspec.json.encode(projector.config))
    (tower,) = said["towers"]
    assert (tower["name"], tower["projector"], tower["layout"], tower["ends"]) == ("world", shape, layout, True)
    assert (tower["tokens"], tower["features"]) == {"spatial": (8, 4), "channel": (6, 6)}[layout]
    assert tower["cache_identity"] == session.cache.identity
    assert tower["array"] == json.loads(msgspec.json.encode(session.cache.spec.array))
    language = session.must_match["language model"]
    assert said["language_model"] == {
        "name": config.model.language_model, "identity": language, "width": 32, "precision": "bf16"
    }  # fmt: skip
    text = {"begins_with_bos": True, "chat_template": GEMMA_TEMPLATE, "end_of_turn": "<end_of_turn>"}
    assert (said["text"], said["training"]) == (text, {"steps": 1, "samples": 8, "val_fraction": 0.2})
    assert said["versions"]["torch"] == torch.__version__


def test_the_newest_checkpoint_is_loaded_or_the_one_named(trained, tmp_path):
    run, checkpoints = trained.run.folder, checkpoints_of(trained.run)
    places = [run, str(checkpoints.path(2)), run / PROJECTOR_FILE, checkpoints.path(1)]
    assert [load_projector(place).config.training.steps for place in places] == [2, 2, 2, 1]
    for name in (CONFIG_FILE, PROJECTOR_FILE):
        shutil.copy(run / name, tmp_path / name)
    assert load_projector(tmp_path).config.training.steps == 2
    with safe_open(tmp_path / PROJECTOR_FILE, "pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} == {"world"}  # noqa: SIM118


def test_what_is_no_projector_is_one_message(trained, tmp_path):
    for place, message in [
        (tmp_path / "nothing", "is no folder of a run, and no projector's file"),
        (tmp_path, "holds no projector: no projector.safetensors and no checkpoint; run `trainer train` first"),
        (trained.run.folder / "config.yaml", "config.yaml cannot be read: "),
    ]:
        with pytest.raises(EncodeOnceError, match=message):
            load_projector(place)
    file = Path(shutil.copy(trained.run.folder / PROJECTOR_FILE, tmp_path))
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        said = json.loads(opened.metadata()[METADATA_KEY])
    tower = said["towers"][0]
    without = {name: tensor for name, tensor in tensors.items() if name != "world.ends"}
    cases = [
        (tensors, None, ConfigError, "is no projector of this program"),
        (tensors, {**said, "format_version": 2, "more": 1}, NewerFormatError, "has format version 2; this program re"),
        (tensors, {**said, "more": 1}, CacheError, "does not hold what it should: Object contains unknown field `more"),
        (tensors, {**said, "towers": [tower, tower]}, CacheError, "has 2 towers"),
        (tensors, {**said, "towers": [{**tower, "projector": "qformer"}]}, CacheError, "does not know|knows: qformer"),
        (tensors, {**said, "towers": [{**tower, "layout": "channel"}]}, CacheError, r"layers.0.weight should be"),
        (without, said, CacheError, r"world.ends should be \(2, 32\), is absent"),
    ]
    for changed, config, error, message in cases:
        save_file(changed, file, {METADATA_KEY: json.dumps(config)} if config else None)
        with pytest.raises(error, match=message):
            load_projector(file)


def test_a_damaged_checkpoint_is_not_used(configured):
    config = configured(max_steps=1)
    train(config, ALONE)
    for _ in damages(checkpoints_of(config.run).path(1) / PROJECTOR_FILE):
        with pytest.raises(CacheError, match="is damaged"):
            load_projector(config.run.folder)
    assert len(load_projector(config.run.folder)(as_tensor(open_cache(config.cache).read(np.arange(3))))) == 3
