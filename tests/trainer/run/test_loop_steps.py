"""What one step of the loop does, seen through real runs: what the optimizer is given and what the log says of it."""

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from cache_store import Cache, open_cache
from tests.trainer.runs import make_loop, metrics, open_alone
from trainer.config import TrainConfig
from trainer.run.optim import learning_rate


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


def test_the_optimizer_steps_at_the_schedules_rate_which_is_logged(configured):
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
                assert self.changed.wait_for(lambda: self.readings > 3 * self.batches, timeout=60)
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
