from itertools import pairwise

import pytest

from cache_store.errors import ConfigError
from tests.trainer.test_projector import make_projector
from trainer.config import DataConfig, OptimConfig, RunConfig
from trainer.optim import learning_rate, make_optimizer


def test_the_learning_rate_warms_up_then_falls_along_a_cosine() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert rates[-1] > 0


def test_a_constant_schedule_stays_and_a_run_shorter_than_its_warm_up_only_rises() -> None:
    assert learning_rate(OptimConfig(lr=2.0, warmup_steps=1, schedule="constant"), 99, 100) == 2.0
    rates = [learning_rate(OptimConfig(warmup_steps=100), step, 10) for step in range(10)]
    assert rates == sorted(rates)


def test_only_matrices_decay() -> None:
    projector = make_projector()
    decayed, free = make_optimizer(projector, OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert any(parameter is projector.ends_2D for parameter in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(projector.parameters()))


def test_the_global_batch_divides_or_the_error_names_the_numbers() -> None:
    DataConfig(batch_size=24, accumulate=2).refuse_undivided(world_size=3)
    with pytest.raises(ConfigError, match=r"data.batch_size 24 .* world size × data.accumulate = 5 × 2 = 10"):
        DataConfig(batch_size=24, accumulate=2).refuse_undivided(world_size=5)


@pytest.mark.parametrize(("epochs", "max_steps", "steps"), [(1, None, 4), (0.5, None, 2), (2, None, 7), (2, 3, 3)])
def test_steps_follow_from_epochs_unless_given(epochs: float, max_steps: int | None, steps: int) -> None:
    assert RunConfig(output="out", epochs=epochs, max_steps=max_steps).total_steps(samples=25, batch_size=8) == steps
