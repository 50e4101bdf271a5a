from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

from tests.trainer.model.test_projector import make_latents, make_projector
from trainer.data.batches import model_input
from trainer.model.language_model import LanguageModel, load_language_model
from trainer.model.model import ModelInput, WorldModel
from trainer.text.store import TextBatch


@pytest.fixture(scope="module")
def language(language_model: Path) -> LanguageModel:
    return load_language_model(str(language_model), torch.float32, torch.device("cpu"))


def make_model(language: LanguageModel, *, bos: bool = True) -> WorldModel:
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
def test_label_only_losses_equal_those_of_full_logits(language_model, language, bos):
    model, batch = make_model(language, bos=bos), make_input()
    full = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    embeddings = full.get_input_embeddings()(batch.tokens_NT)
    world = model.projector(batch.latents_NCHW)
    inputs = torch.cat([embeddings[:, :bos], world, embeddings[:, int(bos) :]], 1)
    before = torch.zeros(len(world), world.shape[1], dtype=torch.long)
    targets = torch.cat([batch.tokens_NT[:, :bos], before, batch.tokens_NT[:, int(bos) :]], 1)
    is_label = torch.zeros_like(targets, dtype=torch.bool)
    is_label[batch.sample_L, batch.column_L + world.shape[1]] = True
    logits = full(inputs_embeds=inputs).logits[:, :-1]
    expected = cross_entropy(logits[is_label[:, 1:]], targets[:, 1:][is_label[:, 1:]], reduction="none")
    assert torch.allclose(model(batch), expected, atol=1e-5)


def test_the_head_sees_the_positions_before_labels_and_no_others(language):
    model, batch, seen = make_model(language), make_input(), list[torch.Tensor]()
    hook = language.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with hook:
        model(batch)
    hidden = language.hidden(model.sequence(batch.latents_NCHW, batch.tokens_NT))
    predicting = batch.column_L + model.projector.num_tokens - 1
    (rows,) = seen
    assert torch.equal(rows, hidden[batch.sample_L, predicting])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_run_in_the_models_precision_losses_in_float32(language_model, dtype):
    language = load_language_model(str(language_model), dtype, torch.device("cpu"))
    model, batch, products = make_model(language), make_input(), list[torch.Tensor]()
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


def test_latents_may_rest_in_half_precision(language):
    model, batch = make_model(language), make_input()
    whole = model(batch)
    for dtype in (torch.float16, torch.bfloat16):
        half = ModelInput(**{**vars(batch), "latents_NCHW": batch.latents_NCHW.to(dtype)})
        assert torch.allclose(model(half), whole, atol=0.05)
