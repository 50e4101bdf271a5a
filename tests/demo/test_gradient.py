"""How large the projector's first gradient is, at the demo's scale: its language model, VAE, scenes and projector.

A frozen decoder normalises what enters, so the gradient is as many times larger as the world tokens are smaller than
the embeddings that it knows. Matching makes that a choice. Without it, it is left to how the layers are initialised:
torch's own way happens to come near, and the way that transformers initialises every linear layer of a model (normal,
0.02) ends far off, the more so on latents that are not standardised.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM

from demo.dataset import samples
from demo.language_model import BATCH, Caption, Lesson, make_language_model, train_on_text
from demo.scenes import draw
from demo.tokenizer import make_tokenizer
from demo.vae import encode, make_vae
from trainer.data.batches import model_input
from trainer.model.language_model import LanguageModel
from trainer.model.model import ModelInput, WorldModel
from trainer.model.projector import LAYOUTS, SHAPES, Projector, rms
from trainer.text.chat import ChatTokenizer
from trainer.text.store import TextBatch

SCENES, TEXT_STEPS = 160, 40
MODERATE = 100


@dataclass(frozen=True)
class Scale:
    """What a projector of the demo meets; `batch` is one of its training steps."""

    gemma: Gemma3ForCausalLM
    language: LanguageModel
    batch: ModelInput
    latents_mean: list[float]
    latents_std: list[float]

    def projector(self, layout: str = "spatial", shape: str = "mlp", *, standardised: bool = True) -> Projector:
        """Not matched yet."""
        channels, height, width = self.batch.latents_NCHW.shape[1:]
        return Projector(
            latent_shape=(channels, height, width),
            width=self.language.width,
            layout=layout,
            shape=shape,
            mean=self.latents_mean if standardised else [0.0] * channels,
            std=self.latents_std if standardised else [1.0] * channels,
            seed=0,
        )

    def matched(self, layout: str = "spatial", shape: str = "mlp", *, to: float = 1.0) -> Projector:
        """As a run begins, or with tokens of `to` times that size."""
        projector = self.projector(layout, shape)
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
def scale() -> Scale:
    drawn = list(samples(SCENES, seed=0))
    tokenizer = make_tokenizer([sample.conversation for sample in drawn])
    chat = ChatTokenizer(tokenizer, str(tokenizer.chat_template), 128)
    texts = chat([sample.id for sample in drawn], [sample.conversation for sample in drawn])
    lessons = [Lesson(Caption.of(sample.scene), text) for sample, text in zip(drawn, texts, strict=True)]
    gemma = make_language_model(tokenizer, seed=0)
    train_on_text(gemma, tokenizer, lessons, TEXT_STEPS, seed=0)
    images = np.stack([np.asarray(draw(sample.scene)) for sample in drawn])
    vae = make_vae(images, seed=0)
    tokens = np.zeros((BATCH, max(len(text.tokens) for text in texts)), np.int64)
    is_label = np.zeros(tokens.shape, bool)
    for row, text in enumerate(texts[:BATCH]):
        tokens[row, : len(text.tokens)], is_label[row, : len(text.tokens)] = text.tokens, text.is_label
    places = np.nonzero(is_label)
    return Scale(
        gemma=gemma,
        language=LanguageModel(gemma.get_input_embeddings(), gemma.get_decoder(), gemma.lm_head, gemma.config),
        batch=model_input(encode(vae, images[:BATCH]).numpy(), TextBatch(tokens, *places, tokens[places])),
        latents_mean=vae.config.latents_mean,
        latents_std=vae.config.latents_std,
    )


def initialised_by_transformers(scale: Scale, projector: Projector) -> Projector:
    """As a layer of the language model itself would be."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in projector.layers:
            scale.gemma._init_weights(layer)
    return projector


def initialised_by_torch(projector: Projector) -> Projector:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in projector.layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return projector


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_standardised_and_matched_the_first_gradient_is_moderate(scale, layout, shape):
    """4.8 to 9.7."""
    projector = scale.matched(layout, shape)
    assert scale.token_rms(projector) == pytest.approx(1, rel=1e-3)
    assert 1 < scale.gradient_norm(projector) < MODERATE / 5


def test_raw_latents_through_layers_as_transformers_initialises_them_are_far_from_moderate(scale):
    unmatched = initialised_by_transformers(scale, scale.projector(standardised=False))
    assert scale.token_rms(unmatched) == pytest.approx(0.017, rel=0.2)
    assert scale.gradient_norm(scale.matched()) == pytest.approx(9.7, rel=0.2)
    assert scale.gradient_norm(unmatched) == pytest.approx(229, rel=0.2)
    assert scale.gradient_norm(unmatched) > MODERATE


def test_raw_latents_through_layers_as_torch_initialises_them_happen_to_come_near(scale):
    unmatched = initialised_by_torch(scale.projector(standardised=False))
    assert scale.token_rms(unmatched) == pytest.approx(0.46, rel=0.2)
    assert scale.gradient_norm(unmatched) == pytest.approx(19.8, rel=0.2)


@pytest.mark.parametrize("size", [0.1, 0.01])
def test_the_gradient_is_as_many_times_larger_as_the_tokens_are_smaller(scale, size):
    ratio = scale.gradient_norm(scale.matched(to=size)) / scale.gradient_norm(scale.matched())
    assert ratio == pytest.approx(1 / size, rel=0.2)
