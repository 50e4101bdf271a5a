"""The auxiliary loss: at every k-th step and no other, exact over resumes, and absent without a weight."""

import pytest
import torch

from tests.trainer.runs import make_loop, metrics, open_alone, train_alone, train_from
from trainer.config import ReconstructionConfig

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
