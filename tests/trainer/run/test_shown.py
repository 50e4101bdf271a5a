"""What training shows of a sample: a pure function of its position, whoever asks, and validation shows none of it."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.errors import Interrupted
from tests.trainer.conftest import MEAN, STD, MakeConfig, described_cache
from tests.trainer.runs import ALONE, assert_same_run, command, end_well, fork_ranks, metrics, open_alone, watched
from trainer import sample_posterior
from trainer.cli import main
from trainer.commands.train import train
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader

ROWS = 40


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 means and 4 log-variances of 3x2 cells each."""
    latents = np.random.default_rng(0).standard_normal((ROWS, 8, 3, 2), np.float32)
    options = {"posterior": "moments", "latents_mean": MEAN, "latents_std": STD, "rejected": [3]}
    return described_cache(tmp_path_factory.mktemp("moments") / "cache", ROWS, latents=latents, **options)


@pytest.fixture(scope="module")
def sampled(configured_here: MakeConfig, moments: Path) -> TrainConfig:
    """A run of 12 steps, whose learning rate does not tell how many there are."""
    config = configured_here("sampled", cache=moments, schedule="constant", warmup_steps=0, max_steps=12)
    train(config, ALONE)
    return config


def test_a_run_that_draws_is_the_same_however_it_is_cut_up(configured_here, sampled, moments):
    """Stopped after a step and within a validation; and on one rank, then on two, then on one."""
    config = configured_here("stopped", cache=moments, schedule="constant", warmup_steps=0, max_steps=12)
    for stop in (4, 8):
        source = watched(config, lambda read, _, stop=stop: read == stop and os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(config, ALONE, source)
    train(config, ALONE)
    assert_same_run(config, sampled)
    steps = {"cache": moments, "schedule": "constant", "warmup_steps": 0}
    train(configured_here("ranks", max_steps=2, **steps), ALONE)
    end_well(*fork_ranks(configured_here("ranks", max_steps=7, accumulate=2, **steps)))
    train(last := configured_here("ranks", max_steps=12, **steps), ALONE)
    for key, tolerance in (("loss", 1e-4), ("val_loss", 1e-3)):
        found, expected = (metrics(each.run.folder, key) for each in (last, sampled))
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=tolerance)


def test_every_showing_is_a_draw_of_its_own_on_any_ranks(sampled):
    session = open_alone(sampled)
    (batch,) = (whole := session.loader(7)).micro_batches
    stored = torch.from_numpy(session.cache.read(whole.numbers)["world"])
    assert torch.equal(batch.latents["world"], sample_posterior(stored, seed=0, positions=range(56, 64)))
    for world_size, accumulate in [(1, 2), (2, 1), (2, 2), (4, 2)]:
        options = {**vars(session.loader), "world_size": world_size, "accumulate": accumulate}
        batches = [StepLoader(**{**options, "rank": rank})(7) for rank in range(world_size)]
        parts = [part.latents["world"] for each in batches for part in each.micro_batches]
        assert torch.equal(torch.cat(parts), batch.latents["world"])


def test_validation_reads_the_mean_whatever_training_drew(configured_here, sampled, moments, capsys):
    """And so does an evaluation, however it is configured; a checkpoint of other draws is not gone on with."""
    for posterior in ("sample", "mean", None):
        config = configured_here("sampled", cache=moments, posterior=posterior)
        assert main(command(config, "eval")) == 0
        assert (
            json.loads(capsys.readouterr().out.splitlines()[-1])["own"] == metrics(sampled.run.folder, "val_loss")[12]
        )
    session = open_alone(sampled)
    numbers = session.split.validation
    latents = session.loader.load(numbers, numbers).latents["world"]
    assert torch.equal(session.model.projectors(latents), session.model.projectors(latents[:, :4]))


def test_a_run_that_drew_goes_on_drawing(configured_here, sampled, moments, refusal):
    drew = refusal(1, configured_here("sampled", cache=moments, posterior="mean", max_steps=13))
    assert "data.posterior  sample             absent" in drew
    mean = configured_here("mean", cache=moments, posterior="mean", schedule="constant", warmup_steps=0, max_steps=1)
    train(mean, ALONE)
    assert metrics(mean.run.folder)[1] != metrics(sampled.run.folder)[1]
    assert "data.posterior  absent             sample" in refusal(1, configured_here("mean", cache=moments))
