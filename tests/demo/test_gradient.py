"""How large the projector's first gradient is, at the demo's scale: its language model, VAE, scenes and projector.

A frozen decoder normalises what enters, so the gradient is as many times larger as the world tokens are smaller than
the embeddings that it knows. Matching makes that a choice.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from demo.language_model import BATCH, make_language_model, train_on_text
from demo.scenes import draw
from demo.vae import encode, make_vae
from trainer.data.batches import model_input
from trainer.model.language_model import LanguageModel
from trainer.model.model import ModelInput, WorldModel
from trainer.model.projector import LAYOUTS, SHAPES, Projector, rms
from trainer.text.store import TextBatch

TEXT_STEPS = 40


@dataclass(frozen=True)
class Scale:
    """What a projector of the demo meets; `batch` is one of its training steps."""

    language: LanguageModel
    batch: ModelInput
    mean: list[float]
    std: list[float]

    def matched(self, layout: str = "spatial", shape: str = "mlp", *, to: float = 1.0) -> Projector:
        """As a run begins, or with tokens of `to` times that size."""
        latent_shape, width = tuple(self.batch.latents_NCHW.shape[1:]), self.language.width
        options = {"layout": layout, "shape": shape, "mean": self.mean, "std": self.std, "seed": 0}
        projector = Projector(latent_shape=latent_shape, width=width, **options)
        projector.match_rms(self.batch.latents_NCHW, to * self.language.embedding_rms())
        return projector

    def gradient_norm(self, projector: Projector) -> float:
        projector.zero_grad()
        WorldModel(self.language, projector, begins_with_bos=True)(self.batch).mean().backward()
        return float(torch.nn.utils.get_total_norm([each.grad for each in projector.parameters()]))

    def token_rms(self, projector: Projector) -> float:
        """Of the world tokens, in units of the language model's own embeddings."""
        return rms(projector(self.batch.latents_NCHW)[:, 1:-1]) / self.language.embedding_rms()


@pytest.fixture(scope="module")
def scale(school) -> Scale:
    gemma = make_language_model(school.tokenizer, seed=0)
    train_on_text(gemma, school.tokenizer, school.lessons, TEXT_STEPS, seed=0)
    images = np.stack([np.asarray(draw(sample.scene)) for sample in school.drawn])
    vae = make_vae(images, seed=0)
    texts = [lesson.text for lesson in school.lessons]
    tokens = np.zeros((BATCH, max(len(text.tokens) for text in texts)), np.int64)
    is_label = np.zeros(tokens.shape, bool)
    for row, text in enumerate(texts[:BATCH]):
        tokens[row, : len(text.tokens)], is_label[row, : len(text.tokens)] = text.tokens, text.is_label
    places = np.nonzero(is_label)
    return Scale(
        LanguageModel(gemma.get_input_embeddings(), gemma.get_decoder(), gemma.lm_head, gemma.config),
        model_input(encode(vae, images[:BATCH]).numpy(), TextBatch(tokens, *places, tokens[places])),
        vae.config.latents_mean,
        vae.config.latents_std,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_standardised_and_matched_the_first_gradient_is_moderate(scale, layout, shape):
    """4.8 to 9.7."""
    projector = scale.matched(layout, shape)
    assert scale.token_rms(projector) == pytest.approx(1, rel=1e-3)
    assert 1 < scale.gradient_norm(projector) < 20


@pytest.mark.parametrize("size", [0.1, 0.01])
def test_the_gradient_is_as_many_times_larger_as_the_tokens_are_smaller(scale, size):
    ratio = scale.gradient_norm(scale.matched(to=size)) / scale.gradient_norm(scale.matched())
    assert ratio == pytest.approx(1 / size, rel=0.2)
