"""What a run starts with."""

import pytest
import torch

from tests.trainer.runs import open_alone
from trainer.data.stream import as_tensor
from trainer.model.projector import rms


def test_a_session_standardises_latents_and_matches_embeddings(configured):
    session = open_alone(configured())
    projector, encoder = session.model.projector, session.cache.spec.array.encoder
    assert tuple(projector.mean_C11.flatten().tolist()) == pytest.approx(encoder.latents_mean)
    assert tuple(projector.std_C11.flatten().tolist()) == pytest.approx(encoder.latents_std)
    latents = as_tensor(session.cache.read(session.split.train))
    assert latents.std((0, 2, 3)).max() > 2
    assert projector.features(latents).std((0, 1)).sub(1).abs().max() < 0.2
    assert projector.features(latents).mean((0, 1)).abs().max() < 0.2
    assert rms(projector(latents)) == pytest.approx(session.model.language.embedding_rms(), rel=0.02)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_model_has_the_runs_precision_the_projector_float32(configured, precision, dtype):
    session = open_alone(configured(precision=precision))
    assert {each.dtype for each in session.model.language.parameters()} == {dtype}
    assert {each.dtype for each in session.model.projector.parameters()} == {torch.float32}
