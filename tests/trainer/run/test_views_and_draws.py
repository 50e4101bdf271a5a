"""The view and the draw that training shows depend on a sample's position alone; validation shows neither."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_store import open_cache
from tests.trainer.conftest import MEAN, STD, MakeConfig, described_cache
from tests.trainer.runs import command, metrics, named_fields, open_alone, train_alone
from trainer import LatentStream, sample_posterior
from trainer.cli import main
from trainer.config import TrainConfig

ROWS = 40
REJECTS = ([3], [3, 11])


def save_views(home: Path, posterior: str) -> list[str]:
    """Save a plain and a flipped view of 4 means of 3x2 cells, with as many log-variances if asked."""
    shape = (2, ROWS, 8 if posterior == "moments" else 4, 3, 2)
    options: dict[str, Any] = {"posterior": posterior, "latents_mean": MEAN, "latents_std": STD}
    for place, latents in enumerate(np.random.default_rng(0).standard_normal(shape, np.float32)):
        own = {"latents": latents, "rejected": REJECTS[place], "image": {"flip": place == 1}}
        described_cache(home / f"view-{place}", ROWS, **own, **options)
    return [str(home / f"view-{place}") for place in range(2)]


@pytest.fixture(scope="module", params=["draws", "views", "draws of views"])
def caches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | list[str]:
    """One cache or two views, which training shows in its own way."""
    paths = save_views(tmp_path_factory.mktemp("caches"), "moments" if "draws" in request.param else "mean")
    return paths if "views" in request.param else paths[0]


@pytest.fixture(scope="module")
def make_shown(
    caches: str | list[str], language_model: Path, tmp_path_factory: pytest.TempPathFactory, configured_here: MakeConfig
) -> MakeConfig:
    """Make the config of a run from these caches."""
    home = tmp_path_factory.mktemp("runs")
    return lambda name, **changes: configured_here(home / name, **{"cache": caches, "max_steps": 12, **changes})


@pytest.fixture(scope="module")
def whole(make_shown: MakeConfig) -> TrainConfig:
    return train_alone(make_shown("whole"))


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
        expected = torch.from_numpy(np.stack(stored)[chosen, np.arange(8)])
        if "moments" in views[0].spec.array.encoder.posterior:
            expected = sample_posterior(expected, seed=0, positions=positions)
        assert torch.equal(batch.latents["world"], expected)
        seen |= {*zip(rows.tolist(), chosen.tolist(), strict=True)}
    assert len(seen) > len(views) * 29  # of some 30 samples in two epochs
    paths, draw = [view["world"] for view in whole.views], "moments" in views[0].spec.array.encoder.posterior
    stream = LatentStream(paths if len(paths) > 1 else paths[0], 8, samples=session.split.train, draw=draw)
    own_loop = stream.batch(7)
    assert own_loop["numbers"].tolist() == loaded.numbers.tolist()
    assert torch.equal(own_loop["latents"], batch.latents["world"])


def test_validation_reads_the_first_view_and_the_mean(make_shown, whole, capsys):
    """Evaluations do so too, however they are configured."""
    for posterior in ("mean", None):
        assert main(command(make_shown("whole", posterior=posterior), "eval")) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["own"] == metrics(whole.run.folder, "val_loss")[12]
    session = open_alone(whole)
    numbers, first = session.split.validation, open_cache(whole.towers["world"])
    latents = session.loader.load(numbers, numbers).latents["world"]
    rows = session.cache.rows(numbers)
    stored = torch.from_numpy(first.read(rows - np.searchsorted(first.rejected_rows(), rows)))
    assert torch.equal(latents, stored)
    projector = session.model.projectors["world"]
    assert torch.equal(projector(latents), projector(stored[:, :4]))
    (row,) = rows[:1].tolist()
    assert main(["generate", str(whole.run.folder), f"--rows={row}", "--max_tokens=2"]) == 0


def test_a_run_resumes_only_with_its_views_in_order_and_its_posterior(make_shown, whole, caches, refusal):
    if isinstance(caches, list):
        error = refusal(1, make_shown("whole", cache=caches[::-1]))
        assert {"cache identity", "data.views.1", "data.views.2"} <= named_fields(error)
    if "data.posterior" in open_alone(whole).must_match:
        assert named_fields(refusal(1, make_shown("whole", posterior="mean"))) == {"data.posterior"}
        mean = train_alone(make_shown("mean", posterior="mean", max_steps=1))
        assert metrics(mean.run.folder)[1] != metrics(whole.run.folder)[1]
        assert named_fields(refusal(1, make_shown("mean"))) == {"data.posterior"}
