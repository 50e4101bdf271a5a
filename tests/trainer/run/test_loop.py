import copy
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cache_store import Cache, open_cache
from cache_store.errors import CacheError, EncodeOnceError, Interrupted
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, PATIENCE_S, assert_same_run, end_well, fork_ranks, make_loop, metrics, open_alone
from trainer.commands.train import train
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader
from trainer.run.folder import checkpoints_of
from trainer.run.optim import learning_rate


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


def test_a_run_lowers_its_loss_and_logs_every_step(uninterrupted):
    folder = uninterrupted.run.folder
    losses = metrics(folder)
    assert list(losses) == list(range(1, 13))
    assert sum(losses[step] for step in (10, 11, 12)) < sum(losses[step] for step in (1, 2, 3)) - 0.1
    assert list(metrics(folder, "val_loss")) == [5, 10, 12]
    assert list(metrics(folder, "val_loss_shuffled")) == [12]
    for key in ("grad_norm", "lr", "samples_per_s", "data_wait_share"):
        assert all(value >= 0 for value in metrics(folder, key).values())
    assert (folder / "config.yaml").exists()


@pytest.mark.parametrize("stops", [(4, 5), (3, 10), *[(read,) for read in (5, 6, 7, 14, 15, 16, 17)]], ids=str)
def test_a_run_stopped_twice_is_the_run_never_stopped(configured_here, uninterrupted, stops):
    """Or once; around the steps that are due a validation, the 5th, 10th and last, and within validations."""
    config = configured_here(f"stopped-{stops}")
    for read in stops:
        stop_at_read(config, read)
    train(config, ALONE)
    assert_same_run(config, uninterrupted)


def test_a_second_training_in_one_folder_names_the_first(configured_here):
    config = configured_here("claimed")

    def start_another(count: int, _: np.ndarray) -> None:
        if count == 3:
            with pytest.raises(CacheError, match=rf"is being written by process {os.getpid()} on "):
                train(config, ALONE)

    train(config, ALONE, Watched(config.cache, start_another))
    assert list(metrics(config.run.folder)) == list(range(1, 13))


def test_a_run_that_died_goes_on_from_its_last_checkpoint(configured_here, uninterrupted):
    config = configured_here("died")

    def die(count: int, latents: np.ndarray) -> None:
        if count == 10:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        train(config, ALONE, Watched(config.cache, die))
    train(config, ALONE)
    assert_same_run(config, uninterrupted)


def test_two_ranks_train_as_one_which_can_go_on_after_them(configured_here, uninterrupted):
    config = configured_here("two-ranks")
    end_well(*fork_ranks(config))
    for key in ("loss", "val_loss"):
        expected = metrics(uninterrupted.run.folder, key)
        assert metrics(config.run.folder, key) == pytest.approx(expected, rel=1e-4)
    alone = configured_here("one-after-two", resume=str(checkpoints_of(config.run).path(5)))
    train(alone, ALONE)
    expected = {step: loss for step, loss in metrics(uninterrupted.run.folder).items() if step > 5}
    assert metrics(alone.run.folder) == pytest.approx(expected, rel=1e-4)


def test_a_signal_to_any_rank_stops_all_after_the_same_step(configured_here):
    config = configured_here("signalled", max_steps=100_000)
    log, ranks = config.run.folder / "metrics.jsonl", fork_ranks(config)
    ranks[0].until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 3)
    ranks[1].send_signal(signal.SIGTERM)
    for code, errors in [rank.end() for rank in ranks]:
        assert code == 3, errors
        assert "trainer: stopped: after step" in errors
    assert checkpoints_of(config.run).steps()[-1] == max(metrics(config.run.folder))


def test_any_world_size_and_accumulation_sees_the_same_batches(uninterrupted):
    session = open_alone(uninterrupted)
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
    session = open_alone(config)
    before = copy.deepcopy(session.model.language.state_dict())
    start = copy.deepcopy(session.model.projector.state_dict())
    make_loop(session).run()
    after = session.model.language.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(each.requires_grad for each in session.model.language.parameters())
    moved = session.model.projector.state_dict()
    assert {name for name in start if torch.equal(start[name], moved[name])} == {"mean_C11", "std_C11"}


def test_a_loss_that_is_not_finite_stops_and_names_its_samples(configured_here):
    config = configured_here("not-finite", save_every=2)

    def spoil(count: int, latents: np.ndarray) -> None:
        if count == 6:
            latents[0] = np.nan

    with pytest.raises(EncodeOnceError, match=r"step 5: loss nan[^§]*samples  sample-0000[^§]*up to step 4 were saved"):
        train(config, ALONE, Watched(config.cache, spoil))
    assert checkpoints_of(config.run).steps() == [2, 4]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({"gradient_checkpointing": True}, 0), ({"accumulate": 4}, 1e-4), ({"precision": "bf16"}, 0.02)],
    ids=str,
)
def test_what_saves_memory_changes_no_loss(configured_here, uninterrupted, changes, tolerance):
    config = configured_here("-".join(changes), **changes)
    train(config, ALONE)
    assert metrics(config.run.folder) == pytest.approx(metrics(uninterrupted.run.folder), rel=tolerance, abs=0)


def optimizer_inputs(config: TrainConfig) -> tuple[list[float], list[set[float]]]:
    """Train; at each step the norm of the gradients that the optimizer gets, and the learning rates of its groups."""
    loop = make_loop(open_alone(config))
    norms, rates = [], []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in loop.parameters])))
        rates.append({group["lr"] for group in optimizer.param_groups})

    loop.optimizer.register_step_pre_hook(look)
    loop.run()
    return norms, rates


def test_gradients_are_clipped_and_logged_as_they_were_before(configured):
    free, bounded = configured("free", max_steps=4, max_grad_norm=None), configured(max_steps=4, max_grad_norm=0.25)
    free_norms, _ = optimizer_inputs(free)
    assert max(free_norms) > 1
    assert list(metrics(free.run.folder, "grad_norm").values()) == pytest.approx(free_norms, rel=1e-5)
    bounded_norms, _ = optimizer_inputs(bounded)
    assert bounded_norms == pytest.approx([0.25] * 4, rel=1e-4)
    assert metrics(bounded.run.folder, "grad_norm")[1] == pytest.approx(free_norms[0], rel=1e-5)


def test_the_optimizer_steps_at_the_schedules_logged_rate(configured):
    config = configured(max_steps=4, warmup_steps=3)
    _, rates = optimizer_inputs(config)
    expected = [learning_rate(config.optim, step, 4) for step in range(4)]
    assert len(set(expected)) == 3
    assert rates == [{rate} for rate in expected]
    assert list(metrics(config.run.folder, "lr").values()) == expected


class HeldBackCache:
    """A cache that gives no batch before the loop waits for it, and then lets its clock go on by `seconds`.

    The loop reads the clock three times a step: before it waits, after that, and after the step.
    """

    def __init__(self, cache: Cache, seconds: float) -> None:
        self.cache, self.seconds = cache, seconds
        self.now, self.readings, self.batches = 0.0, 0, 0
        self.changed = threading.Condition()
        self.held_back = False

    def clock(self) -> float:
        with self.changed:
            self.readings += 1
            self.changed.notify_all()
            return self.now

    def read(self, numbers: np.ndarray) -> np.ndarray:
        if self.held_back:
            with self.changed:
                assert self.changed.wait_for(lambda: self.readings > 3 * self.batches, timeout=PATIENCE_S)
                self.batches += 1
                self.now += self.seconds
        return self.cache.read(numbers)


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.0), (10.0, 0.25), (90.0, 0.75)])
def test_the_data_wait_share_is_that_of_a_held_back_source(configured, seconds, share):
    """Each batch is held back for so long, and each step works for 30 s."""
    config = configured(max_steps=4, val_fraction=0.0)
    source = HeldBackCache(open_cache(config.cache), seconds)
    session = open_alone(config, source)

    def work(*_: Any) -> None:
        source.now += 30.0

    session.model.register_forward_hook(work)
    source.held_back = True
    make_loop(session, clock=source.clock).run()
    assert list(metrics(config.run.folder, "data_wait_share").values()) == [share] * 4
    assert list(metrics(config.run.folder, "samples_per_s").values()) == [8 / (seconds + 30)] * 4


@pytest.mark.parametrize(("gradient_checkpointing", "passes"), [(True, 2), (False, 1)])
def test_recomputed_layers_are_computed_twice_a_step(configured, gradient_checkpointing, passes):
    session = open_alone(configured(max_steps=4, gradient_checkpointing=gradient_checkpointing, val_fraction=0.0))
    calls: Counter[int] = Counter()
    layers = session.model.language.decoder.layers
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: calls.update([number]))
    make_loop(session).run()
    assert calls == dict.fromkeys(range(len(layers)), 4 * passes)
