"""Latents become tokens of the language model's width and size; losses come out at the label tokens."""

import math

import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy

from cache_store import CacheError
from tests.trainer.conftest import MEAN
from tests.trainer.models import BFLOAT16, FLOAT32, make_input, make_latents, make_model, make_projector
from trainer.model.projector import SHAPES, rms


@pytest.mark.parametrize(("layout", "tokens"), [("spatial", 6), ("channel", 4)])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_latent_becomes_start_its_tokens_and_end_of_one_size(layout, tokens, shape):
    projector, other, latents = make_projector(layout, shape), make_projector(layout, shape, seed=1), make_latents()
    assert not torch.equal(projector.layers[0].weight, other.layers[0].weight)
    projector.match_rms(latents, 1.7)
    out = projector(latents)
    assert out.shape == (64, tokens + 2, 24)
    assert projector.num_tokens == tokens + 2
    assert torch.equal(out[:, [0, -1]], projector.ends.expand(64, 2, -1))
    assert rms(out[:, 1:-1]) == pytest.approx(1.7, rel=1e-4)
    assert rms(out[:, [0, -1]]) == pytest.approx(1.7, rel=1e-4)


@pytest.mark.parametrize(
    ("value", "std"), [(MEAN[1], 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.0, math.nan), (0.0, 0.0)]
)
def test_latents_that_cannot_be_standardised_are_refused(value, std):
    projector, latents = make_projector(), torch.tensor(MEAN)[:, None, None].repeat(8, 1, 3, 2)
    latents[[3, 7], 1, 2, 0], projector.std[2] = value, std
    with pytest.raises(CacheError, match="8 samples"):
        projector.match_rms(latents, 1.0)


@pytest.mark.parametrize("bos", [True, False])
def test_label_only_losses_equal_those_of_full_logits(language_model, bos):
    model, batch = make_model(language_model, bos=bos), make_input()
    full = hf.AutoModelForCausalLM.from_pretrained(language_model, dtype=FLOAT32)
    embeddings = full.get_input_embeddings()(batch.tokens_NT)
    world = model.projectors(batch.latents)
    inputs = torch.cat([embeddings[:, :bos], world, embeddings[:, int(bos) :]], 1)
    logits = full(inputs_embeds=inputs).logits[batch.sample_L, batch.column_L + world.shape[1] - 1]
    seen = list[torch.Tensor]()
    model.language.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert torch.allclose(model(batch), cross_entropy(logits, batch.target_L, reduction="none"), atol=1e-5)
    assert [rows.shape for rows in seen] == [(len(batch.target_L), model.language.width)]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_products_run_in_the_models_precision_losses_in_float32(language_model, dtype):
    model, batch, products = make_model(language_model, dtype), make_input(), list[torch.Tensor]()
    for layer in model.projectors["world"].layers[::2]:
        layer.register_forward_hook(lambda _, inputs, output: products.append(output))
    losses = model(batch)
    losses.sum().backward()
    assert model.sequence(batch.latents, batch.tokens_NT).dtype == dtype
    assert {each.dtype for each in products} == {dtype}
    float32 = [losses, *(each for weight in model.projectors.parameters() for each in (weight, weight.grad))]
    assert {each.dtype for each in float32} == {FLOAT32}
