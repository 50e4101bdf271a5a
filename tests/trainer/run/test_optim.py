from itertools import pairwise

import pytest

from cache_store.errors import ConfigError
from tests.trainer.model.test_projector import make_projector
from trainer.config import DataConfig, OptimConfig, TrainRunConfig
from trainer.run.optim import learning_rate, make_optimizer


def test_the_learning_rate_warms_up_then_falls_or_stays():
    config = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert rates[-1] > 0
    assert learning_rate(OptimConfig(lr=2.0, warmup_steps=1, schedule="constant"), 99, 100) == 2.0


@pytest.mark.parametrize(("total_steps", "warmup"), [(1, 0), (9, 0), (46, 4), (1_000, 100), (50_000, 100)])
def test_a_run_of_any_length_reaches_its_peak(total_steps, warmup):
    rates = [learning_rate(OptimConfig(lr=1.0), step, total_steps) for step in range(total_steps)]
    assert rates.index(1.0) == max(0, warmup - 1)
    assert OptimConfig(warmup_steps=7).warmup(total_steps) == 7


def test_only_matrices_decay():
    projector = make_projector()
    decayed, free = make_optimizer(projector, OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert any(parameter is projector.ends_2D for parameter in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(projector.parameters()))


def test_the_global_batch_divides_or_the_error_names_the_numbers():
    DataConfig(batch_size=24, accumulate=2).refuse_undivided(world_size=3)
    with pytest.raises(ConfigError, match=r"data.batch_size 24 .* world size × data.accumulate = 5 × 2 = 10"):
        DataConfig(batch_size=24, accumulate=2).refuse_undivided(world_size=5)


@pytest.mark.parametrize(("epochs", "max_steps", "steps"), [(1, None, 4), (0.5, None, 2), (2, None, 7), (2, 3, 3)])
def test_steps_follow_from_epochs_unless_given(epochs, max_steps, steps):
    run = TrainRunConfig(output="out", epochs=epochs, max_steps=max_steps)
    assert run.total_steps(samples=25, batch_size=8) == steps
