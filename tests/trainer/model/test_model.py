"""Latents become tokens, losses come out at labels, and a frozen language model computes as its own forward does."""

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from cache_store import CacheError
from cache_store.errors import ConfigError, ModelError
from tests.named import assert_names
from tests.trainer.conftest import MEAN, save_language_model
from tests.trainer.models import (
    BFLOAT16,
    FLOAT32,
    LAYER_TYPES,
    drop_weights,
    load,
    make_input,
    make_latents,
    make_model,
    make_projector,
    save_decoder,
)
from trainer.model.kernels import attention_kernels, choose_attention
from trainer.model.language_model import LanguageModel
from trainer.model.projector import CAUSAL, SHAPES, rms


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


compiling = pytest.mark.filterwarnings(  # torch's compiler uses what torch deprecates or warns of
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
BIDIRECTIONAL = partial(save_language_model, use_bidirectional_attention=True)


REFUSED = [
    (hf.Qwen2AudioConfig().save_pretrained, FLOAT32, "qwen2_audio qwen2"),
    (hf.T5Config().save_pretrained, FLOAT32, "t5"),
    (hf.SiglipVisionConfig().save_pretrained, FLOAT32, "siglip_vision_model"),
    (hf.BertConfig().save_pretrained, FLOAT32, "bert"),
    (partial(save_decoder, kind=hf.BertConfig, is_decoder=True), FLOAT32, ""),
    (partial(save_decoder, kind=hf.Gemma4TextConfig, **LAYER_TYPES), FLOAT32, "embeddings"),
    *((BIDIRECTIONAL, dtype, "causal") for dtype in (FLOAT32, BFLOAT16)),
    (lambda folder: drop_weights(save_language_model(folder), "q_proj"), FLOAT32, "2 q_proj"),
    (hf.GPT2Config(**QUANTISED).save_pretrained, FLOAT32, "quantization_config config.json"),
]


@pytest.mark.parametrize(("save", "dtype", "names"), REFUSED)
def test_a_model_that_would_not_be_what_it_says_is_refused(tmp_path, save, dtype, names):
    save(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, dtype)
    assert_names(caught.value, f"{tmp_path} {names}")
    assert "\n" not in str(caught.value)


def test_the_identity_follows_the_weights_and_not_the_precision(language_model, tmp_path):
    identity = load(language_model).identity()
    assert identity == load(language_model, BFLOAT16).identity()
    assert identity == load(shutil.copytree(language_model, tmp_path / "moved")).identity()
    tuned = load(language_model)
    with torch.no_grad():
        next(tuned.decoder.layers[1].parameters()).mul_(1.5)
    assert tuned.identity() != identity


@pytest.mark.slow
@compiling
def test_layers_are_compiled_once_for_each_kind_and_length_to_the_same_gradients(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = save_language_model(tmp_path, num_hidden_layers=4, layer_types=kinds)
    plain, model = load(folder), load(folder)
    torch._dynamo.reset()
    model.compile_decoder("layers", backend="aot_eager")
    attention_kernels(model, 8)  # a run asks for them first
    counters.clear()
    graphs = []
    for length in (*range(8, 48, 8), 8, 16):
        leaves = [torch.linspace(-1, 1, 2 * length * 32).view(2, length, 32).requires_grad_() for _ in range(2)]
        for each, leaf in zip((plain, model), leaves, strict=True):
            each.hidden(leaf * 2).square().sum().backward()
        assert torch.allclose(leaves[0].grad, leaves[1].grad, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] < graphs[1] < graphs[2] < graphs[3] < graphs[4] == graphs[5] == graphs[6]
    assert 8 < graphs[4] <= 10


def profiled_attention(model: LanguageModel, tokens: int, block_1T: torch.Tensor | None) -> set[str]:
    """Return the attention operations of a forward and backward pass, by the names of torch's profiler."""
    embeddings_1TD = torch.randn(1, tokens, model.width, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as recorded:
        model.hidden(embeddings_1TD, block_1T).sum().backward()
    names = {event.name.removeprefix("aten::") for event in recorded.events()}
    return {name for name in names if name.startswith("_scaled_dot_product") and not name.endswith("_backward")}


@pytest.mark.parametrize("image", [False, True], ids=["causal", "image tokens see each other"])
def test_the_profiler_sees_the_kernel_that_was_chosen_and_no_other(tmp_path, image):
    """Sliding layers have masks, and full attention among image tokens gives all layers masks."""
    model, tokens = load(save_language_model(tmp_path)), 90
    block_1T = torch.tensor([[CAUSAL] + [0] * 60 + [CAUSAL] * 29]) if image else None
    model.checkpoint_layers("selective")
    flash, math = ({f"_scaled_dot_product_{name}"} for name in ("flash_attention_for_cpu", "attention_math"))
    assert profiled_attention(model, tokens, block_1T) == flash
    for choice, seen in (("math", math), ("flash", flash)):
        choose_attention(model, choice, tokens, block_1T)
        assert profiled_attention(model, tokens, block_1T) == seen
    for choice in ("efficient", "cudnn"):
        with pytest.raises(ConfigError, match=rf"^run.attention: {choice} .* 90 .*auto$"):
            choose_attention(model, choice, tokens, block_1T)


def kept_bytes(folder: Path, kind: str) -> float:
    """Count the bytes that a forward pass keeps for the backward pass, per token, layer and value of the width."""
    model = load(folder, BFLOAT16)
    if kind != "none":
        model.checkpoint_layers(kind)
    embeddings = torch.randn(1, 64, 320).bfloat16().requires_grad_()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as recorded:
        hidden = model.hidden(embeddings * 1)
    allocated: int = sum(event.self_cpu_memory_usage for event in recorded.key_averages())
    return (allocated - hidden.nbytes) / (64 * 2 * 320)


def test_selective_checkpointing_keeps_less_than_half(tmp_path):
    """The model has the proportions of Gemma 3 4B, which keeps 127 KB per token and layer: 50 times its width."""
    sizes = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = save_language_model(tmp_path, head_dim=32, **sizes)
    kept = {kind: kept_bytes(folder, kind) for kind in ("none", "selective", "full")}
    assert 45 < kept["none"] < 55
    assert kept["selective"] < kept["none"] / 2
    assert kept["full"] < kept["none"] / 10
