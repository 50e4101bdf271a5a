"""Latents in, losses at the label tokens out."""

import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy, linear

from tests.trainer.conftest import save_language_model
from tests.trainer.models import BFLOAT16, FLOAT32, make_input, make_model


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_a_loss_in_chunks_has_the_losses_and_gradients_of_one(tmp_path, soft_cap):
    folder = save_language_model(tmp_path, final_logit_softcapping=soft_cap)
    whole, chunked = make_model(folder), make_model(folder)
    chunked.loss_chunk = 4
    for model in (whole, chunked):
        (model(make_input()) * torch.arange(9)).sum().backward()
    assert torch.allclose(whole(make_input()), chunked(make_input()), atol=1e-6)
    assert torch.allclose(whole.score(make_input()), chunked.score(make_input()), atol=1e-6)
    for one, other in zip(whole.projectors.parameters(), chunked.projectors.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


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
    projector = model.projectors["world"]
    first, features = projector.layers[0], projector.features(batch.latents["world"])
    assert torch.equal(products[0], linear(features.to(dtype), first.weight.to(dtype), first.bias.to(dtype)))
