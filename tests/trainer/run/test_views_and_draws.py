"""The view and the draw that training shows depend on a sample's position alone; validation shows neither."""

import json

import numpy as np
import pytest
import torch

from cache_store import open_cache
from tests.trainer.conftest import MEAN, STD, MakeConfig, described_cache
from tests.trainer.runs import command, metrics, named_fields, open_alone, train_alone
from trainer import LatentStream, sample_posterior
from trainer.cli import main
from trainer.config import TrainConfig

REJECTS = ([3], [3, 11])


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A plain and a flipped view of 4 means of 3x2 cells, with as many log-variances."""
    home, latents = tmp_path_factory.mktemp("caches"), np.random.default_rng(0).standard_normal((2, 40, 8, 3, 2))
    options = {"posterior": "moments", "latents_mean": MEAN, "latents_std": STD}
    for place, (shown, rejected) in enumerate(zip(latents.astype(np.float32), REJECTS, strict=True)):
        image = {"flip": place == 1}
        described_cache(home / f"view-{place}", 40, latents=shown, rejected=rejected, image=image, **options)
    return [str(home / f"view-{place}") for place in range(2)]


@pytest.fixture(scope="module")
def whole(configured_here: MakeConfig, caches: list[str]) -> TrainConfig:
    return train_alone(configured_here("whole", cache=caches, max_steps=12))


def test_a_batch_holds_each_samples_view_and_draw(whole):
    session = open_alone(whole)
    views = [open_cache(view["world"]) for view in whole.views]
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
    paths = [view["world"] for view in whole.views]
    own_loop = LatentStream(paths, 8, samples=session.split.train, draw=True).batch(7)
    assert torch.equal(own_loop["latents"], batch.latents["world"])


def test_validation_reads_the_first_view_and_the_mean(configured_here, whole, caches, capsys):
    """Evaluations do so too, however they are configured."""
    assert main(command(configured_here("whole", cache=caches, posterior="mean"), "eval")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["own"] == metrics(whole.run.folder, "val_loss")[12]
    session = open_alone(whole)
    numbers, first = session.split.validation, open_cache(whole.towers["world"])
    latents = session.loader.load(numbers, numbers).latents["world"]
    rows = session.cache.rows(numbers)
    stored = torch.from_numpy(first.read(rows - np.searchsorted(first.rejected_rows(), rows)))
    assert torch.equal(latents, stored)
    projector = session.model.projectors["world"]
    assert torch.equal(projector(latents), projector(stored[:, :4]))


def test_a_run_resumes_only_with_its_views_in_order_and_its_posterior(configured_here, whole, caches, refusal):
    error = refusal(1, configured_here("whole", cache=caches[::-1]))
    assert {"cache identity", "data.views.1", "data.views.2"} <= named_fields(error)
    assert named_fields(refusal(1, configured_here("whole", cache=caches, posterior="mean"))) == {"data.posterior"}
