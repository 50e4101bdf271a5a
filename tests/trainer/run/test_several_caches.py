"""Runs from several caches: of two towers, or views whose moments are drawn from; their order and form decide."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store import open_cache
from tests.make_cache import make_cache, text_recipe
from tests.named import assert_names
from tests.trainer.conftest import MEAN, STD, MakeConfig, describe, described_cache
from tests.trainer.runs import Caches, command, metrics, named_fields, open_alone, train_alone
from trainer import LatentStream, load_projector, sample_posterior
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.data.draws import as_tensor
from trainer.model.model_config import TowerConfig
from trainer.model.projector import rms
from trainer.model.projector_file import CONFIG_FILE

ROWS = 40
TOWERS = {"siglip": TowerConfig(projector="linear", ends="none")}


def tower_cache(path: Path, rows: int = ROWS, rejected: tuple[int, ...] = (5, 17)) -> Path:
    """Write a cache of six tokens of twelve features, far from standard normal."""
    tokens = 3 * np.random.default_rng(1).standard_normal((rows, 6, 12), np.float32) + 1
    return make_cache(
        path, tokens, conversations=[describe(row) for row in range(rows)], rejected=rejected, samples_per_shard=16
    )


@pytest.fixture(scope="module")
def caches(cache_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Two caches of 40 rows, in shards of different sizes; 3, 5, 17 and 39 are rejected in one or both."""
    return {"world": str(cache_path), "siglip": str(tower_cache(tmp_path_factory.mktemp("tower") / "cache"))}


@pytest.fixture(scope="module")
def two(configured_here: MakeConfig, caches: Caches) -> TrainConfig:
    return train_alone(configured_here("two", cache=caches, towers=TOWERS, sample_captions=2))


def test_both_towers_learn_and_describe_what_they_read(two, caches):
    session = open_alone(two)
    before, after = session.model.projectors, load_projector(two.run.folder)
    assert after.names == ("world", "siglip")
    moved = {
        f"{tower}.{name}"
        for tower, each in before.items()
        for name, value in each.state_dict().items()
        if not torch.equal(value, after[tower].state_dict()[name])
    }
    layers = {"world.layers.0", "world.layers.2", "siglip.layers.0"}
    assert moved == {"world.ends", *(f"{layer}.{each}" for layer in layers for each in ("weight", "bias"))}
    world, siglip = json.loads((two.run.folder / CONFIG_FILE).read_text())["towers"]
    assert (world["tokens"], world["layout"], world["ends"]) == (8, "spatial", True)
    assert (siglip["tokens"], siglip["features"], siglip["layout"], siglip["ends"]) == (6, 12, "token", False)
    assert len(session.cache) == ROWS - 4
    samples = {name: as_tensor(each) for name, each in session.cache.read(np.arange(5)).items()}
    out = before(samples)
    assert out.shape == (5, before.num_tokens, 32) == (5, 14, 32)
    assert torch.equal(out[:, 8:], before["siglip"](samples["siglip"]))
    own = session.model.language.embedding_rms()
    assert [rms(each) for each in (out[:, :8], out[:, 8:])] == [pytest.approx(own, rel=0.2)] * 2


@pytest.mark.slow
def test_a_text_tower_is_trained_beside_a_vae(configured_here, cache_path, refusal, tmp_path):
    tokens = np.random.default_rng(1).standard_normal((ROWS, 6, 12), np.float32)
    talk = [describe(row) for row in range(ROWS)]
    text = make_cache(tmp_path / "text", tokens, conversations=talk, text=text_recipe(6))
    config = configured_here(
        "text-tower",
        cache={"world": str(cache_path), "text": str(text)},
        towers={"text": TOWERS["siglip"]},
        max_steps=2,
    )
    train_alone(config)
    assert_names(refusal(2, configured_here("texts", cache=text)), f"cache: {text} holds texts beside it in `caches`")
    _, tower = json.loads((config.run.folder / CONFIG_FILE).read_text())["towers"]
    assert (tower["tokens"], tower["array"]["text"]["max_tokens"], "image" in tower["array"]) == (6, 6, False)


@pytest.mark.slow
def test_a_tower_joins_a_trained_one_which_may_stay_frozen(configured_here, caches, refusal, capsys):
    first = train_alone(configured_here("first", cache=caches["world"], max_steps=2))
    options = {"cache": caches, "init_projector": str(first.run.folder), "max_steps": 2}
    frozen = {**TOWERS, "world": TowerConfig(trained=False)}
    second = train_alone(configured_here("second", **options, towers=frozen))
    assert_names(capsys.readouterr().out, "siglip")
    start, end = load_projector(first.run.folder), load_projector(second.run.folder)
    for name, value in start["world"].state_dict().items():
        assert torch.equal(value, end["world"].state_dict()[name])
    assert [tower.trained for tower in end.config.towers] == [False, True]
    frozen_new = configured_here("third", **options, towers={"siglip": TowerConfig(trained=False)})
    refusal(2, frozen_new, names="siglip model.towers")


ONE = ["--cache=a", "--caches=null"]
REFUSED = [
    (2, ["--model.towers={siglop: {}}"], "siglop siglip?"),
    (2, ["--model.towers={siglip: {trained: false}}"], "siglip model.init_projector"),
    (2, ["--model.towers={siglip: {projector: pretrained, ends: learned}}"], "siglip ends"),
    (2, ["--model.towers={world: {projector: pretrained}, siglip: {projector: pretrained}}"], "world siglip"),
    (2, ["--model.towers={siglip: {layout: spatial}}"], "[token, feature 12]"),
    (1, ["--model.towers={siglip: {projector: pretrained}}"], "projector"),
    (2, ["--model.towers={siglip: {end: none}}"], "model.towers.siglip.ends?"),
    (2, ["--data.max_text_tokens=250"], "16 data.max_text_tokens 250 266"),
    (2, ["--caches={A.b: c}"], "caches A.b 32"),
    (2, [*ONE, "--model.projector=pretrained"], "model.projector world --model.towers"),
]


@pytest.mark.parametrize(("code", "options", "names"), REFUSED)
def test_towers_that_cannot_be_are_one_message(configured, caches, refusal, tmp_path, code, options, names):
    error = refusal(code, configured(cache=caches), "train", *options, names=names)
    assert sum(line.startswith("trainer: ") for line in error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_cells_of_a_clip_are_tokens(configured, tmp_path):
    latents = np.random.default_rng(0).standard_normal((12, 4, 5, 2, 3), np.float32)
    clips = described_cache(tmp_path / "clips", 12, latents=latents, clips=True)
    run = train_alone(configured(cache=clips, max_steps=2)).run.folder
    projector, shown = load_projector(run), as_tensor(open_cache(clips).read(np.arange(2)))
    assert projector.num_tokens == 5 * 2 * 3 + 2
    assert projector(shown).shape == (2, projector.num_tokens, 32)


def test_another_form_of_a_tower_is_another_run(two, configured_here, caches, refusal):
    changed = {"siglip": TowerConfig(projector="linear")}
    config = configured_here("two", cache=caches, towers=changed, max_steps=13)
    assert named_fields(refusal(1, config)) == {"siglip.model.ends"}
    error = refusal(1, configured_here("two", cache={"siglip": caches["siglip"]}), "eval")
    assert named_fields(error) == {"towers"}
    assert_names(error, "--caches world: siglip:")


REJECTS = ([3], [3, 11])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A plain and a flipped view of 4 means of 3x2 cells, with as many log-variances."""
    home, latents = tmp_path_factory.mktemp("paths"), np.random.default_rng(0).standard_normal((2, 40, 8, 3, 2))
    options = {"posterior": "moments", "latents_mean": MEAN, "latents_std": STD}
    for place, (shown, rejected) in enumerate(zip(latents.astype(np.float32), REJECTS, strict=True)):
        image = {"flip": place == 1}
        described_cache(home / f"view-{place}", 40, latents=shown, rejected=rejected, image=image, **options)
    return [str(home / f"view-{place}") for place in range(2)]


@pytest.fixture(scope="module")
def viewed(configured_here: MakeConfig, paths: list[str]) -> TrainConfig:
    return train_alone(configured_here("whole", cache=paths, max_steps=12))


def test_a_batch_holds_each_samples_view_and_draw(viewed):
    session = open_alone(viewed)
    views = [open_cache(view["world"]) for view in viewed.views]
    order, seen = session.loader.stream.order, set()
    for step in range(8):
        (batch,) = (loaded := session.loader(step)).micro_batches
        positions = np.arange(8 * step, 8 * step + 8)
        rows = session.cache.rows(loaded.numbers)
        stored = [view.read(rows - np.searchsorted(view.rejected_rows(), rows)) for view in views]
        chosen = order.views(order.places(positions), len(views))
        expected = sample_posterior(np.stack(stored)[chosen, np.arange(8)], seed=0, positions=positions)
        assert torch.equal(batch.latents["world"], expected)
        seen |= {*zip(rows.tolist(), chosen.tolist(), strict=True)}
    assert len(seen) > len(views) * 29  # of some 30 samples in two epochs
    paths = [view["world"] for view in viewed.views]
    own_loop = LatentStream(paths, 8, samples=session.split.train, draw=True).batch(7)
    assert torch.equal(own_loop["latents"], batch.latents["world"])


def test_validation_reads_the_first_view_and_the_mean(configured_here, viewed, paths, capsys):
    """Evaluations do so too, however they are configured."""
    assert main(command(configured_here("whole", cache=paths, posterior="mean"), "eval")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["own"] == metrics(viewed.run.folder, "val_loss")[12]
    session = open_alone(viewed)
    numbers, first = session.split.validation, open_cache(viewed.towers["world"])
    latents = session.loader.load(numbers, numbers).latents["world"]
    rows = session.cache.rows(numbers)
    stored = torch.from_numpy(first.read(rows - np.searchsorted(first.rejected_rows(), rows)))
    assert torch.equal(latents, stored)
    projector = session.model.projectors["world"]
    assert torch.equal(projector(latents), projector(stored[:, :4]))


def test_a_run_resumes_only_with_its_views_in_order_and_its_posterior(configured_here, viewed, paths, refusal):
    error = refusal(1, configured_here("whole", cache=paths[::-1]))
    assert {"cache identity", "data.views.1", "data.views.2"} <= named_fields(error)
    assert named_fields(refusal(1, configured_here("whole", cache=paths, posterior="mean"))) == {"data.posterior"}
