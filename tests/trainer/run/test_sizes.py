"""Runs on images of several sizes: each step is of one size, and as exact as with one."""

import json
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.trainer.answers import export_and_ask, reported
from tests.trainer.conftest import MakeConfig, describe
from tests.trainer.runs import command, metrics, open_alone, train_alone
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.run.memory import largest_image

SHAPES, ROWS = [(4, 3, 2), (4, 2, 2), (4, 1, 5)], [21, 14, 7]
FEW = {"epochs": 2, "batch_size": 4, "val_fraction": 0.3, "eval_batch_size": 4}


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("sized") / "cache"
    latents = [random.standard_normal((rows, *shape), np.float32) for rows, shape in zip(ROWS, SHAPES, strict=True)]
    conversations = [describe(row) for row in range(sum(ROWS))]
    return make_cache(path, latents, conversations=conversations, rejected=[3, 17], dtype="float32")


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig, sized: Path) -> TrainConfig:
    return train_alone(configured_here("sized", cache=sized, sample_captions=12, **FEW))


def test_eval_captions_and_answers_take_each_image_in_its_size(trained, sized, tmp_path, capsys):
    captions = metrics(trained.run.folder, "captions")
    rows, spec = [each["row"] for each in [*captions.values()][-1]], open_cache(sized).spec
    assert {*spec.array_indices[[spec.shard_of_row(row) for row in rows]]} == {0, 1, 2}
    capsys.readouterr()
    assert main(command(trained, "eval")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["own"] == pytest.approx([*metrics(trained.run.folder, "val_loss").values()][-1])
    ask = trained.run.folder, tmp_path / "report.json", "--max_tokens=4", "--rows=41,0,1,25,24,2"
    assert reported(*ask) == reported(*ask, "--batch_size=1")
    for row in (1, 41):
        assert_names(export_and_ask(trained, tmp_path / str(row), rows=(row,)), "up to 8 tokens")


def test_the_largest_images_are_tried_for_memory(configured, sized):
    session = open_alone(configured(cache=sized, **FEW))
    assert session.cache.first.array_indices(np.array([largest_image(session)])) == [0]
    train_alone(configured("fitted", cache=sized, fit_memory=True, max_steps=2, **FEW))
