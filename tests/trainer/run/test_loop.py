import copy
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store import open_cache
from cache_store.errors import CacheError, EncodeOnceError, Interrupted
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, end_well, fork_ranks, metrics
from trainer.commands.train import train
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader
from trainer.run.checkpoint import PROJECTOR_FILE, CheckpointFolder
from trainer.run.inputs import open_inputs
from trainer.run.loop import TrainingLoop
from trainer.run.session import open_session


class Watched:
    """A cache that calls `at_read(count, latents)` on each read: one calibrates, then each step reads once."""

    def __init__(self, cache: str, at_read: Callable[[int, np.ndarray], None]) -> None:
        self.cache, self.at_read, self.reads = open_cache(cache), at_read, 0

    def read(self, numbers: np.ndarray) -> np.ndarray:
        self.reads += 1
        latents = self.cache.read(numbers)
        self.at_read(self.reads, latents)
        return latents


def stop_at_read(config: TrainConfig, read: int) -> None:
    """Train until that read, at which somebody stops the run."""
    source = Watched(config.cache, lambda count, _: os.kill(os.getpid(), signal.SIGTERM) if count == read else None)
    with pytest.raises(Interrupted, match="run the same command to go on"):
        train(config, ALONE, source)


@pytest.fixture(scope="module")
def uninterrupted(configured_here: MakeConfig) -> TrainConfig:
    config = configured_here("uninterrupted")
    train(config, ALONE)
    return config


def output(config: TrainConfig) -> Path:
    return Path(config.run.output)


def test_a_run_lowers_its_loss_and_logs_every_step(uninterrupted):
    losses = metrics(output(uninterrupted))
    assert list(losses) == list(range(1, 13))
    assert sum(losses[step] for step in (10, 11, 12)) < sum(losses[step] for step in (1, 2, 3)) - 0.1
    assert list(metrics(output(uninterrupted), "val_loss")) == [5, 10, 12]
    assert list(metrics(output(uninterrupted), "val_loss_shuffled")) == [12]
    for key in ("grad_norm", "lr", "samples_per_s", "data_wait_share"):
        assert all(value >= 0 for value in metrics(output(uninterrupted), key).values())
    assert (output(uninterrupted) / "config.yaml").exists()


def assert_same_run(config: TrainConfig, uninterrupted: TrainConfig, *keys: str) -> None:
    for key in ("loss", *keys):
        assert metrics(output(config), key) == metrics(output(uninterrupted), key)


@pytest.mark.parametrize("stops", [(3, 4), (2, 9)])
def test_a_run_stopped_twice_is_the_run_never_stopped(configured_here, uninterrupted, stops):
    config = configured_here(f"stopped-{stops[0]}-{stops[1]}")
    for steps in stops:
        stop_at_read(config, steps + 1)
    train(config, ALONE)
    assert_same_run(config, uninterrupted, "grad_norm")
    projectors = [(output(each) / PROJECTOR_FILE).read_bytes() for each in (config, uninterrupted)]
    assert projectors[0] == projectors[1]


@pytest.mark.parametrize("read", [5, 6, 7, 14, 15, 16, 17])
def test_a_validation_that_a_stop_came_before_is_made_up_for(configured_here, uninterrupted, read):
    """Reads around the steps that are due one: the 5th, the 10th and the last, and within the validations."""
    config = configured_here(f"owing-{read}")
    stop_at_read(config, read)
    train(config, ALONE)
    assert_same_run(config, uninterrupted, "val_loss", "val_loss_shuffled")
    assert list(metrics(output(config))) == list(range(1, 13))


def test_a_second_training_in_one_folder_names_the_first(configured_here):
    config = configured_here("claimed")

    def start_another(count: int, _: np.ndarray) -> None:
        if count == 3:
            with pytest.raises(CacheError, match=rf"is being written by process {os.getpid()} on "):
                train(config, ALONE)

    train(config, ALONE, Watched(config.cache, start_another))
    assert list(metrics(output(config))) == list(range(1, 13))


def test_a_run_that_died_goes_on_from_its_last_checkpoint(configured_here, uninterrupted):
    config = configured_here("died")

    def die(count: int, latents: np.ndarray) -> None:
        if count == 10:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        train(config, ALONE, Watched(config.cache, die))
    train(config, ALONE)
    assert metrics(output(config)) == metrics(output(uninterrupted))


def test_a_finished_run_is_left_as_it_is(uninterrupted, capsys):
    before = (output(uninterrupted) / "metrics.jsonl").read_bytes()
    train(uninterrupted, ALONE)
    assert (output(uninterrupted) / "metrics.jsonl").read_bytes() == before
    assert "going on after step 12 of 12" in capsys.readouterr().out


def test_two_ranks_train_as_one_which_can_go_on_after_them(configured_here, uninterrupted):
    config = configured_here("two-ranks")
    end_well(*fork_ranks(config, 2))
    assert metrics(output(config)) == pytest.approx(metrics(output(uninterrupted)), rel=1e-4)
    assert metrics(output(config), "val_loss") == pytest.approx(metrics(output(uninterrupted), "val_loss"), rel=1e-4)
    checkpoint = CheckpointFolder(output(config) / "checkpoints", 3).path(5)
    alone = configured_here("one-after-two", resume=str(checkpoint))
    train(alone, ALONE)
    expected = {step: loss for step, loss in metrics(output(uninterrupted)).items() if step > 5}
    assert metrics(output(alone)) == pytest.approx(expected, rel=1e-4)


def test_a_signal_to_any_rank_stops_all_after_the_same_step(configured_here):
    config = configured_here("signalled", max_steps=100_000)
    ranks = fork_ranks(config, 2)
    deadline = time.monotonic() + 100
    while not (output(config) / "metrics.jsonl").exists() or len(metrics(output(config))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGTERM)
    for code, errors in [rank.end() for rank in ranks]:
        assert code == 3, errors
        assert "trainer: stopped: after step" in errors
    assert CheckpointFolder(output(config) / "checkpoints", 3).steps()[-1] == max(metrics(output(config)))


def test_any_world_size_and_accumulation_sees_the_same_batches(uninterrupted):
    session = open_session(open_inputs(uninterrupted, ALONE))
    whole = session.loader(7)
    for world_size in (1, 2, 4):
        for accumulate in (1, 2):
            options = {**vars(session.loader), "world_size": world_size, "accumulate": accumulate}
            loaders = [StepLoader(**{**options, "rank": rank}) for rank in range(world_size)]
            batches = [loader(7) for loader in loaders]
            parts = [part.latents_NCHW for batch in batches for part in batch.micro_batches]
            assert torch.equal(torch.cat(parts), whole.micro_batches[0].latents_NCHW)
            assert {batch.label_tokens for batch in batches} == {whole.label_tokens}
            assert {len(part) for part in parts} == {8 // (world_size * accumulate)}


def test_training_leaves_the_language_model_bit_identical(configured_here):
    config = configured_here("frozen", max_steps=3)
    session = open_session(open_inputs(config, ALONE))
    before = copy.deepcopy(session.model.language.state_dict())
    start = copy.deepcopy(session.model.projector.state_dict())
    TrainingLoop(session, CheckpointFolder(output(config) / "checkpoints", 1)).run()
    after = session.model.language.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = session.model.projector.state_dict()
    assert {name for name in start if torch.equal(start[name], moved[name])} == {"mean_C11", "std_C11"}


def test_a_loss_that_is_not_finite_stops_and_names_its_samples(configured_here):
    config = configured_here("not-finite", save_every=2)

    def spoil(count: int, latents: np.ndarray) -> None:
        if count == 6:
            latents[0] = np.nan

    with pytest.raises(EncodeOnceError, match=r"step 5: loss nan[^§]*samples  sample-0000[^§]*up to step 4 were saved"):
        train(config, ALONE, Watched(config.cache, spoil))
    assert CheckpointFolder(output(config) / "checkpoints", 3).steps() == [2, 4]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({"gradient_checkpointing": True}, 0), ({"accumulate": 4}, 1e-4), ({"precision": "bf16"}, 0.02)],
    ids=str,
)
def test_what_saves_memory_changes_no_loss(configured_here, uninterrupted, changes, tolerance):
    config = configured_here("-".join(changes), **changes)
    train(config, ALONE)
    assert metrics(output(config)) == pytest.approx(metrics(output(uninterrupted)), rel=tolerance, abs=0)
