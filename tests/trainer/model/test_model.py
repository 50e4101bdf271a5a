"""Latents in, losses at the label tokens out: the projector, and the whole model around it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

from cache_store import CacheError
from trainer.data.batches import model_input
from trainer.model.language_model import load_language_model
from trainer.model.model import ModelInput, WorldModel
from trainer.model.projector import SHAPES, Projector, rms
from trainer.text.store import TextBatch

MEAN, STD = (0.5, -1.0, 2.0, 0.0), (2.0, 0.5, 3.0, 1.0)


def make_projector(layout: str = "spatial", shape: str = "mlp", width: int = 24, seed: int = 0) -> Projector:
    return Projector(latent_shape=(4, 3, 2), width=width, layout=layout, shape=shape, mean=MEAN, std=STD, seed=seed)


def make_latents(count: int = 64) -> torch.Tensor:
    noise = torch.randn(count, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


@pytest.mark.parametrize(("layout", "tokens"), [("spatial", 6), ("channel", 4)])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_latent_becomes_start_its_tokens_and_end_of_one_size(layout, tokens, shape):
    projector, latents = make_projector(layout, shape), make_latents()
    projector.match_rms(latents, 1.7)
    out = projector(latents)
    assert out.shape == (64, tokens + 2, 24)
    assert projector.num_tokens == tokens + 2
    assert torch.equal(out[:, [0, -1]], projector.ends_2D.expand(64, 2, -1))
    assert rms(out[:, 1:-1]) == pytest.approx(1.7, rel=1e-4)
    assert rms(out[:, [0, -1]]) == pytest.approx(1.7, rel=1e-4)


def test_features_are_standardised_cells_or_channels_of_the_means():
    latents = make_latents()
    moments = torch.cat([latents, torch.full_like(latents, torch.nan)], 1)
    spatial, channel = (make_projector(layout).features(moments) for layout in ("spatial", "channel"))
    assert torch.equal(channel[1, 2], (latents[1, 2].flatten() - MEAN[2]) / STD[2])
    assert torch.equal(spatial, channel.transpose(1, 2))


def test_equal_seeds_give_equal_weights():
    one, same, other = (make_projector(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.weight"], other["layers.0.weight"])


@pytest.mark.parametrize(
    ("value", "std", "message"),
    [
        (None, 3.0, "nothing to learn"),
        *((value, 3.0, "2 of the 8 samples .* hold NaN or infinity") for value in (math.nan, math.inf, -math.inf)),
        *((1.0, std, f"latent channel 2 cannot .* deviation {std}") for std in (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_latents_that_cannot_be_standardised_are_refused(value, std, message):
    """`value` in two samples that else are the mean; the standard deviation of channel 2."""
    projector, latents = make_projector(), torch.tensor(MEAN)[:, None, None].repeat(8, 1, 3, 2)
    if value is not None:
        latents[[3, 7], 1, 2, 0] = value
    projector.std_C11[2] = std
    with pytest.raises(CacheError, match=message):
        projector.match_rms(latents, 1.0)


def make_model(folder: Path, dtype: torch.dtype = torch.float32, *, bos: bool = True) -> WorldModel:
    language = load_language_model(str(folder), dtype, torch.device("cpu"))
    projector = make_projector(width=language.width)
    projector.match_rms(make_latents(), language.embedding_rms())
    return WorldModel(language, projector, begins_with_bos=bos)


def make_input(lengths: tuple[int, ...] = (9, 5, 7)) -> ModelInput:
    """Samples of these text lengths whose last three tokens are labels."""
    tokens = np.random.default_rng(0).integers(6, 20, (len(lengths), max(lengths)))
    is_label = np.zeros(tokens.shape, bool)
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
        is_label[row, length - 3 : length] = True
    sample, column = np.nonzero(is_label)
    return model_input(make_latents(len(lengths)).numpy(), TextBatch(tokens, sample, column, tokens[sample, column]))


@pytest.mark.parametrize("bos", [True, False])
def test_label_only_losses_equal_those_of_full_logits(language_model, bos):
    model, batch = make_model(language_model, bos=bos), make_input()
    full = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    embeddings = full.get_input_embeddings()(batch.tokens_NT)
    world = model.projector(batch.latents_NCHW)
    inputs = torch.cat([embeddings[:, :bos], world, embeddings[:, int(bos) :]], 1)
    logits = full(inputs_embeds=inputs).logits[batch.sample_L, batch.column_L + world.shape[1] - 1]
    seen = list[torch.Tensor]()
    model.language.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert torch.allclose(model(batch), cross_entropy(logits, batch.target_L, reduction="none"), atol=1e-5)
    assert [rows.shape for rows in seen] == [(len(batch.target_L), model.language.width)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_run_in_the_models_precision_losses_in_float32(language_model, dtype):
    model, batch, products = make_model(language_model, dtype), make_input(), list[torch.Tensor]()
    for layer in model.projector.layers[::2]:
        layer.register_forward_hook(lambda _, inputs, output: products.append(output))
    losses = model(batch)
    losses.sum().backward()
    assert model.sequence(batch.latents_NCHW, batch.tokens_NT).dtype == dtype
    assert {each.dtype for each in products} == {dtype}
    float32 = [losses, *(each for weight in model.projector.parameters() for each in (weight, weight.grad))]
    assert {each.dtype for each in float32} == {torch.float32}
    first, features = model.projector.layers[0], model.projector.features(batch.latents_NCHW)
    assert torch.equal(products[0], linear(features.to(dtype), first.weight.to(dtype), first.bias.to(dtype)))
