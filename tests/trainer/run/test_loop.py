import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_store import Cache, open_cache
from cache_store.errors import CacheError, EncodeOnceError, Interrupted
from tests.trainer.runs import ALONE, fork_ranks, make_config, metrics, start_ranks
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader
from trainer.run.checkpoint import PROJECTOR_FILE, CheckpointFolder
from trainer.run.inputs import open_inputs
from trainer.run.loop import TrainingLoop, train
from trainer.run.session import open_session


class Watched:
    """A cache that calls `at_read(count, latents)` on each read."""

    def __init__(self, cache: Cache, at_read: Any) -> None:
        self.cache, self.at_read, self.reads = cache, at_read, 0

    def read(self, numbers: np.ndarray) -> np.ndarray:
        self.reads += 1
        latents = self.cache.read(numbers)
        self.at_read(self.reads, latents)
        return latents


@pytest.fixture(scope="module")
def text_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of this module stand side by side here and share their tokenised text."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(cache_path: Path, language_model: Path, text_home: Path) -> TrainConfig:
    config = make_config(cache_path, language_model, text_home / "uninterrupted")
    train(config, ALONE)
    return config


def output(config: TrainConfig) -> Path:
    return Path(config.run.output)


def test_a_run_lowers_its_loss_and_logs_every_step(uninterrupted: TrainConfig) -> None:
    losses = metrics(output(uninterrupted))
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 0.1
    assert list(metrics(output(uninterrupted), "val_loss")) == [5, 10, 12]
    assert list(metrics(output(uninterrupted), "val_loss_shuffled")) == [12]
    for key in ("grad_norm", "lr", "samples_per_s", "data_wait_share"):
        assert all(value >= 0 for value in metrics(output(uninterrupted), key).values())
    assert (output(uninterrupted) / "config.yaml").exists()


@pytest.mark.parametrize("stops", [(3, 4), (2, 9)])
def test_a_run_stopped_twice_gives_the_losses_of_one_never_stopped(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path, stops: tuple[int, int]
) -> None:
    config = make_config(cache_path, language_model, text_home / f"stopped-{stops[0]}-{stops[1]}")
    cache = open_cache(cache_path)

    def stop_at(wanted: int) -> Any:
        # One read calibrates; each step reads once.
        return lambda count, _: os.kill(os.getpid(), signal.SIGTERM) if count == wanted + 1 else None

    for wanted in stops:
        with pytest.raises(Interrupted, match="run the same command to go on"):
            train(config, ALONE, Watched(cache, stop_at(wanted)))
    train(config, ALONE)
    assert metrics(output(config)) == metrics(output(uninterrupted))
    assert metrics(output(config), "grad_norm") == metrics(output(uninterrupted), "grad_norm")
    projectors = [(output(each) / PROJECTOR_FILE).read_bytes() for each in (config, uninterrupted)]
    assert projectors[0] == projectors[1]


@pytest.mark.parametrize("read", [5, 6, 7, 14, 15, 16, 17])
def test_a_validation_that_a_stop_came_before_is_made_up_for(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path, read: int
) -> None:
    """Reads around the steps that are due one: the 5th, the 10th and the last, and within the validations."""
    config = make_config(cache_path, language_model, text_home / f"owing-{read}")

    def stop(count: int, _: np.ndarray) -> None:
        if count == read:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="run the same command to go on"):
        train(config, ALONE, Watched(open_cache(cache_path), stop))
    train(config, ALONE)
    for key in ("loss", "val_loss", "val_loss_shuffled"):
        assert metrics(output(config), key) == metrics(output(uninterrupted), key)
    assert list(metrics(output(config))) == list(range(1, 13))


def test_a_second_training_in_one_folder_is_refused_and_names_the_first(
    cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "claimed")

    def start_another(count: int, _: np.ndarray) -> None:
        if count == 3:
            with pytest.raises(CacheError, match=rf"is being written by process {os.getpid()} on "):
                train(config, ALONE)

    train(config, ALONE, Watched(open_cache(cache_path), start_another))
    assert list(metrics(output(config))) == list(range(1, 13))


def test_a_run_that_died_goes_on_from_its_last_checkpoint(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "died")

    def die(count: int, latents: np.ndarray) -> None:
        if count == 10:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        train(config, ALONE, Watched(open_cache(cache_path), die))
    train(config, ALONE)
    assert metrics(output(config)) == metrics(output(uninterrupted))


def test_a_finished_run_is_left_as_it_is(uninterrupted: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    before = (output(uninterrupted) / "metrics.jsonl").read_bytes()
    train(uninterrupted, ALONE)
    assert (output(uninterrupted) / "metrics.jsonl").read_bytes() == before
    assert "going on after step 12 of 12" in capsys.readouterr().out


def test_accumulation_changes_no_loss(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "accumulated", accumulate=4)
    train(config, ALONE)
    assert metrics(output(config)) == pytest.approx(metrics(output(uninterrupted)), rel=1e-4)


def test_two_ranks_give_the_losses_of_one_which_can_go_on_from_their_checkpoint(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "two-ranks")
    for process in start_ranks(config, 2):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert metrics(output(config)) == pytest.approx(metrics(output(uninterrupted)), rel=1e-4)
    assert metrics(output(config), "val_loss") == pytest.approx(metrics(output(uninterrupted), "val_loss"), rel=1e-4)
    checkpoint = CheckpointFolder(output(config) / "checkpoints", 3).path(5)
    alone = make_config(cache_path, language_model, text_home / "one-after-two", resume=str(checkpoint))
    train(alone, ALONE)
    expected = {step: loss for step, loss in metrics(output(uninterrupted)).items() if step > 5}
    assert metrics(output(alone)) == pytest.approx(expected, rel=1e-4)


def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "signalled", max_steps=100_000)
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


def test_any_world_size_and_accumulation_sees_the_same_global_batches(uninterrupted: TrainConfig) -> None:
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


def test_training_leaves_the_language_model_bit_identical(
    cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "frozen", max_steps=3)
    session = open_session(open_inputs(config, ALONE))
    before = copy.deepcopy(session.model.language.state_dict())
    start = copy.deepcopy(session.model.projector.state_dict())
    TrainingLoop(session, CheckpointFolder(output(config) / "checkpoints", 1)).run()
    after = session.model.language.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = session.model.projector.state_dict()
    assert {name for name in start if torch.equal(start[name], moved[name])} == {"mean_C11", "std_C11"}


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_samples(
    cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "not-finite", save_every=2)

    def spoil(count: int, latents: np.ndarray) -> None:
        if count == 6:
            latents[0] = np.nan

    with pytest.raises(EncodeOnceError, match=r"step 5: loss nan[^§]*samples  sample-0000[^§]*up to step 4 were saved"):
        train(config, ALONE, Watched(open_cache(cache_path), spoil))
    assert CheckpointFolder(output(config) / "checkpoints", 3).steps() == [2, 4]


def test_recomputed_layers_give_the_same_run(
    uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path
) -> None:
    config = make_config(cache_path, language_model, text_home / "recomputed", gradient_checkpointing=True)
    train(config, ALONE)
    assert metrics(output(config)) == metrics(output(uninterrupted))


def test_bf16_trains(uninterrupted: TrainConfig, cache_path: Path, language_model: Path, text_home: Path) -> None:
    config = make_config(cache_path, language_model, text_home / "bf16", precision="bf16")
    train(config, ALONE)
    assert metrics(output(config)) == pytest.approx(metrics(output(uninterrupted)), rel=0.02)
