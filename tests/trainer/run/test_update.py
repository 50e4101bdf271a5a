"""One update: AdamW, its rate, its decay, clipping before it, and the auxiliary loss at every k-th step."""

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


EVERY_THIRD = ReconstructionConfig(weight=1.0, every=3)


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_the_loss_is_computed_at_every_kth_step_only_and_falls(configured, kind):
    config = configured(reconstruction=ReconstructionConfig(weight=1.0, every=3, kind=kind), max_steps=60, lr=1e-2)
    session = open_alone(config)
    calls, steps = [], []
    session.model.reconstruction.register_forward_hook(lambda *_: calls.append(len(steps)))
    loop = make_loop(session)
    update = loop.updater
    loop.updater = lambda *given, **named: (steps.append(given[1]), update(*given, **named))[1]
    loop.updater.optimizer = update.optimizer
    loop.run()
    losses = metrics(config.run.folder, "reconstruction_loss")
    assert calls == list(losses) == list(range(3, 61, 3))
    assert losses[60] < 0.8 * losses[3]
    assert list(metrics(config.run.folder, "grad_norm.reconstruction.matrices")) == list(losses)


def test_a_run_resumes_with_the_loss_and_without(configured_here, capfd):
    """The head starts with new weights, or is left out."""
    plain = train_alone(configured_here("plain-first", max_steps=5, schedule="constant", warmup_steps=0))
    joined = train_from(plain, 5, configured_here("joined", reconstruction=EVERY_THIRD))
    assert list(metrics(joined.run.folder, "reconstruction_loss")) == [6, 9, 12]
    assert "reconstruction.heads.world.weight 4x32" in capfd.readouterr().out
    left = train_from(joined, 10, configured_here("left"))
    assert list(metrics(left.run.folder)) == [11, 12]


def test_the_latent_at_a_world_token_is_predicted_from_the_state_there(configured):
    """If hidden states are the standardised latents, a head that copies them has no loss."""
    session = open_alone(configured(reconstruction=ReconstructionConfig(weight=1.0, kind="mse")))
    model, batch = session.model, session.loader(0).micro_batches[0]
    features_NSF = model.projectors["world"].features(batch.latents["world"])
    hidden_NTD = torch.full((len(features_NSF), 30, 32), torch.nan)
    first = 1 + 1  # BOS, START
    hidden_NTD[:, first : first + 6] = 0
    hidden_NTD[:, first : first + 6, :4] = features_NSF
    head = model.reconstruction.heads["world"]
    torch.nn.init.eye_(head.weight)
    assert model.reconstruction(hidden_NTD, batch.latents, model.projectors).abs().max() == 0
