"""AdamW: its rate, its decay, clipping before it, and its state in the host's memory."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.trainer.models import make_projector
from tests.trainer.runs import assert_same_run, make_loop, metrics, open_alone, train_alone, train_from
from trainer.config import OptimConfig, ReconstructionConfig
from trainer.run.checkpoint import OPTIMIZER_FILE
from trainer.run.folder import checkpoints_of
from trainer.run.update import learning_rate, make_optimizer, parameter_groups


def test_gradients_are_clipped_and_rates_set_as_the_log_says(configured):
    config = configured(max_steps=4, max_grad_norm=0.25, warmup_steps=3)
    loop, norms, rates = make_loop(open_alone(config)), [], []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in loop.updater.parameters])))
        rates.extend(group["lr"] for group in optimizer.param_groups)

    loop.updater.optimizer.register_step_pre_hook(look)
    loop.run()
    before, logged = (list(metrics(config.run.folder, key).values()) for key in ("grad_norm", "lr"))
    assert max(before) > 1
    assert norms == pytest.approx([0.25] * 4, rel=1e-4)
    assert logged == rates[::2] == rates[1::2] == [learning_rate(config.optim, step, 4) for step in range(4)]


def test_the_learning_rate_warms_up_then_falls_or_stays():
    config = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert rates[-1] > 0
    assert learning_rate(OptimConfig(lr=2.0, warmup_steps=1, schedule="constant"), 99, 100) == 2.0
    for total_steps, warmup in ((1, 0), (9, 0), (46, 4), (1_000, 100), (50_000, 100)):
        rates = [learning_rate(OptimConfig(lr=1.0), step, total_steps) for step in range(total_steps)]
        assert rates.index(1.0) == max(0, warmup - 1)


def test_only_matrices_decay():
    projector = make_projector()
    groups = make_optimizer(parameter_groups([("world", projector)]), OptimConfig(weight_decay=0.1)).param_groups
    decay = {id(each): group["weight_decay"] for group in groups for each in group["params"]}
    decayed = {name for name, each in projector.named_parameters() if decay[id(each)]}
    assert decayed == {"layers.0.weight", "layers.2.weight"}


def test_a_run_with_its_optimizer_in_the_hosts_memory_is_the_run_without(configured_here):
    """The checkpoints are the same too, and each run resumes from the other's."""
    heads = {"reconstruction": ReconstructionConfig(weight=1.0, every=1)}
    plain, offloaded = (train_alone(configured_here(f"offload-{on}", offload=on, **heads)) for on in (False, True))
    losses = [metrics(each.run.folder, "reconstruction_loss") for each in (plain, offloaded)]
    assert losses[0] == losses[1]
    assert_same_run(plain, offloaded)
    moments = [(checkpoints_of(each.run).newest() / OPTIMIZER_FILE).read_bytes() for each in (plain, offloaded)]
    assert moments[0] == moments[1]
    for before, on in ((plain, True), (offloaded, False)):
        config = train_from(before, 5, configured_here(f"after-{on}", offload=on, **heads))
        newest = checkpoints_of(config.run).newest() / OPTIMIZER_FILE
        assert newest.read_bytes() == moments[0]
