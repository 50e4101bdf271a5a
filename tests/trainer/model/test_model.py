"""Latents in, losses at the label tokens out: the projector, the frozen language model, and both together."""

import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, linear

from cache_store import CacheError
from cache_store.errors import ConfigError, ModelError
from tests.trainer.conftest import MEAN, STD, TINY, save_language_model
from trainer.data.batches import model_input
from trainer.insight.profile_parts import saved_bytes
from trainer.model.kernels import MATH, attention_kernels, choose_attention
from trainer.model.language_model import LanguageModel
from trainer.model.load_language_model import load_with_whole
from trainer.model.model import ModelInput, WorldModel
from trainer.model.pretrained import loading_bar_hidden
from trainer.model.projector import CAUSAL, SHAPES, Projector, Projectors, rms
from trainer.text.store import TextBatch

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def make_projector(layout: str = "spatial", shape: str = "mlp", width: int = 24, seed: int = 0) -> Projector:
    return Projector(sample_shape=(4, 3, 2), width=width, layout=layout, shape=shape, mean=MEAN, std=STD, seed=seed)


def make_latents(count: int = 64) -> torch.Tensor:
    noise = torch.randn(count, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


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


def test_features_are_standardised_cells_or_channels():
    latents = make_latents()
    moments = torch.cat([latents, torch.full_like(latents, torch.nan)], 1)
    spatial, channel = (make_projector(layout).features(moments) for layout in ("spatial", "channel"))
    assert torch.equal(channel[1, 2], (latents[1, 2].flatten() - MEAN[2]) / STD[2])
    assert torch.equal(spatial, channel.transpose(1, 2))


def test_latents_that_cannot_be_standardised_are_refused():
    projector, latents = make_projector(), torch.tensor(MEAN)[:, None, None].repeat(8, 1, 3, 2)
    with pytest.raises(CacheError, match="nothing to learn"):
        projector.match_rms(latents, 1.0)
    for value in (math.nan, math.inf, -math.inf):
        latents[[3, 7], 1, 2, 0] = value
        with pytest.raises(CacheError, match="2 of the 8 samples .* hold NaN or infinity"):
            projector.match_rms(latents, 1.0)
    for std in (0.0, -1.0, math.nan, math.inf):
        projector.std[2] = std
        with pytest.raises(CacheError, match=f"latent channel 2 cannot .* deviation {std}"):
            projector.match_rms(latents, 1.0)


def load(folder: Path, dtype: torch.dtype = FLOAT32) -> LanguageModel:
    return load_with_whole(str(folder), dtype, torch.device("cpu"))[0]


def save_decoder(folder: Path, kind: type[hf.PreTrainedConfig], **settings: object) -> Path:
    """A tiny model of another architecture, with random weights."""
    ours = {name: value for name, value in TINY.items() if name not in ("layer_types", "sliding_window", "head_dim")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(kind(**{**ours, **special, **settings})).save_pretrained(folder)
    return folder


def save_multimodal(folder: Path) -> Path:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    markers = {"image_token_index": 20, "boi_token_index": 21, "eoi_token_index": 22}
    config = hf.Gemma3Config(text_config=TINY, vision_config=vision, mm_tokens_per_image=4, **markers)
    hf.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def drop_weights(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_multimodal_checkpoint_gives_its_text_model_quietly(tmp_path, capfd):
    folder = save_multimodal(tmp_path)
    drop_weights(folder, "vision_tower")  # which are not read
    capfd.readouterr()
    model = load(folder)
    assert type(model.decoder).__name__ == "Gemma3TextModel"
    assert not any("vision" in name for name, _ in model.named_parameters())
    with loading_bar_hidden():
        assert not are_progress_bars_disabled()  # the Hub's, over a download
    assert (capfd.readouterr().err, hf.utils.logging.is_progress_bar_enabled()) == ("", True)


LAYER_TYPES = {"layer_types": TINY["layer_types"]}
MULTIPLIERS = {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
SCALED = {
    "none": (hf.LlamaConfig, {}, 1.0),
    "gpt2": (hf.GPT2Config, {}, 1.0),
    "soft cap": (hf.Gemma3TextConfig, {"final_logit_softcapping": 0.1, "head_dim": 16, **LAYER_TYPES}, 1.0),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.0625}, 0.0625),
    "cohere2": (hf.Cohere2Config, {"logit_scale": 0.3, **LAYER_TYPES}, 0.3),
    "granite": (hf.GraniteConfig, MULTIPLIERS, 1 / 6),
    "falcon_h1": (hf.FalconH1Config, {"lm_head_multiplier": 0.3, **MAMBA}, 0.3),
    "hyperclovax": (hf.HyperCLOVAXConfig, {"logits_scaling": 6.0}, 6.0),
}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("kind", "settings", "scale"), SCALED.values(), ids=SCALED)
def test_losses_are_those_of_models_that_scale_their_logits(tmp_path, kind, settings, scale, dtype):
    folder = save_decoder(tmp_path, kind, **settings)
    model, full = load(folder, dtype), hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokens = torch.randint(model.config.vocab_size, (3, 9))
    expected = full(input_ids=tokens, labels=tokens).loss
    logits = model.logits(model.hidden(model.embed(tokens))[:, :-1])
    found = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    assert (model.width, model.max_tokens, model.logit_scale) == (32, 256, scale)
    assert torch.allclose(found, expected.float(), atol=1e-6 if dtype == FLOAT32 else 1e-3)


def save_audio_config(folder: Path) -> None:
    hf.Qwen2AudioConfig().save_pretrained(folder)


REFUSED = [
    (
        save_audio_config,
        FLOAT32,
        "is multimodal (qwen2_audio), and its text model (qwen2) cannot be used by itself here; name",
    ),
    (partial(save_decoder, kind=hf.BertConfig, is_decoder=True), FLOAT32, "in a way the trainer does not know"),
    (partial(save_decoder, kind=hf.Gemma4TextConfig, **LAYER_TYPES), FLOAT32, "fails when it runs on embeddings"),
    (partial(save_language_model, use_bidirectional_attention=True), FLOAT32, "is not causal"),
    (partial(save_language_model, use_bidirectional_attention=True), BFLOAT16, "is not causal"),
    (lambda folder: drop_weights(save_language_model(folder), "q_proj"), FLOAT32, "lacks 2 of its weights (model.laye"),
    (lambda folder: drop_weights(save_multimodal(folder), "embed_tokens"), FLOAT32, " of its weights ("),
]


@pytest.mark.parametrize(("save", "dtype", "reason"), REFUSED)
def test_a_model_that_would_not_be_what_it_says_is_refused(tmp_path, save, dtype, reason):
    save(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, dtype)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_embedding_rms_has_gemmas_scale_in_it(language_model):
    model = load(language_model)
    bare = model.embed.weight.double().square().mean().sqrt()
    assert model.embedding_rms() == pytest.approx(float(bare) * TINY["hidden_size"] ** 0.5, rel=1e-3)


def test_the_identity_follows_the_weights_and_not_the_precision(language_model, tmp_path):
    identity = load(language_model).identity()
    assert identity == load(language_model, BFLOAT16).identity()
    assert identity == load(shutil.copytree(language_model, tmp_path / "moved")).identity()
    tuned = load(language_model)
    with torch.no_grad():
        next(tuned.decoder.layers[1].parameters()).mul_(1.5)
    assert tuned.identity() != identity


# The compiler imports what torch deprecates, and looks at gradients that torch warns of.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_give_the_same_gradients_at_every_length(tmp_path):
    folder = save_language_model(tmp_path, num_hidden_layers=1, layer_types=["full_attention"])
    plain, compiled = load(folder), load(folder)
    compiled.checkpoint_layers()
    # Graphs are captured as they are for inductor, whose own compilation would take minutes here.
    compiled.compile_decoder(backend="aot_eager")
    for length in (7, 12, 9):
        leaves = [torch.linspace(-1, 1, 2 * length * 32).view(2, length, 32).requires_grad_() for _ in range(2)]
        for model, leaf in zip((plain, compiled), leaves, strict=True):
            model.hidden(leaf * 2).square().sum().backward()
        assert torch.allclose(leaves[0].grad, leaves[1].grad, atol=1e-5)


# The compiler imports what torch deprecates, and looks at gradients that torch warns of.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_are_compiled_once_for_each_kind_and_length(tmp_path):
    """Four layers of two kinds; a length that comes again costs nothing."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = load(save_language_model(tmp_path, num_hidden_layers=4, layer_types=kinds))
    torch._dynamo.reset()
    model.compile_decoder("layers", backend="aot_eager")
    attention_kernels(model, 8)  # which a run asks for first
    counters.clear()
    graphs = []
    for length in (8, 16, 8, 16):
        model.hidden(torch.randn(2, length, 32, requires_grad=True) * 2).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 1 <= graphs[0] <= 2
    assert graphs[0] < graphs[1] == graphs[2] == graphs[3] <= 4


def test_the_kernel_of_each_kind_of_layer_is_named_and_none_is_math_at_4_098_tokens(tmp_path):
    """512² pixels make as many; sliding layers have a mask, which not every kernel takes."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = save_language_model(tmp_path, num_hidden_layers=3, layer_types=kinds, max_position_embeddings=8192)
    model = load(folder)
    kernels = attention_kernels(model, 4_098)
    assert kernels.keys() == set(kinds)
    assert set(kernels.values()) == {"flash"}
    model.config._attn_implementation = "eager"
    assert set(attention_kernels(model, 16).values()) == {MATH}
    assert len(model.decoder.layers) == 3


def profiled_attention(model: LanguageModel, tokens: int, block_1T: torch.Tensor | None) -> set[str]:
    """Attention operations of a forward and backward pass, as torch's profiler names them."""
    embeddings_1TD = torch.randn(1, tokens, model.width, requires_grad=True)
    with torch.profiler.profile() as recorded:
        model.hidden(embeddings_1TD, block_1T).sum().backward()
    names = {event.name.removeprefix("aten::") for event in recorded.events()}
    return {name for name in names if name.startswith("_scaled_dot_product") and not name.endswith("_backward")}


@pytest.mark.parametrize("image", [False, True], ids=["causal", "image tokens see each other"])
def test_the_profiler_sees_the_kernel_that_was_chosen_and_no_other(tmp_path, image):
    """Sliding layers have masks, and so have all where image tokens see each other; math is chosen to be seen here."""
    model, tokens = load(save_language_model(tmp_path)), 90
    block_1T = torch.tensor([[CAUSAL] + [0] * 60 + [CAUSAL] * 29]) if image else None
    model.checkpoint_layers("selective")
    flash, math = ({f"_scaled_dot_product_{name}"} for name in ("flash_attention_for_cpu", "attention_math"))
    assert profiled_attention(model, tokens, block_1T) == flash
    for choice, seen in (("math", math), ("flash", flash)):
        choose_attention(model, choice, tokens, block_1T)
        assert profiled_attention(model, tokens, block_1T) == seen
    for choice in ("efficient", "cudnn"):
        with pytest.raises(ConfigError, match=rf"^run.attention: {choice} does not run here, at 90 tokens .*: auto$"):
            choose_attention(model, choice, tokens, block_1T)


def kept_bytes(folder: Path, kind: str) -> float:
    """Bytes that a forward pass keeps for the backward pass, of each token, layer and value of the model's width."""
    model = load(folder, BFLOAT16)
    if kind != "none":
        model.checkpoint_layers(kind)
    embeddings = torch.randn(1, 64, 320).bfloat16().requires_grad_()
    with saved_bytes(model.parameters()) as kept:
        hidden = model.hidden(embeddings * 1)
    hidden.float().sum().backward()
    return sum(kept.values()) / (64 * 2 * 320)


def test_selective_checkpointing_keeps_less_than_half(tmp_path):
    """Of a model with Gemma 3 4B's proportions, which keeps 127 KB of each token and layer: 50 times its width."""
    sizes = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = save_language_model(tmp_path, head_dim=32, **sizes)
    kept = {kind: kept_bytes(folder, kind) for kind in ("none", "selective", "full")}
    assert 45 < kept["none"] < 55
    assert kept["selective"] < kept["none"] / 2
    assert kept["full"] < kept["none"] / 10


def test_a_frozen_matrix_keeps_none_of_what_it_reads():
    linear, inputs = torch.nn.Linear(64, 8).requires_grad_(False), torch.randn(100, 64, requires_grad=True)
    with saved_bytes(linear.parameters()) as kept:
        linear(inputs * 1).sum()
    assert sum(kept.values()) == 0


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


def make_model(folder: Path, dtype: torch.dtype = FLOAT32, *, bos: bool = True) -> WorldModel:
    language = load(folder, dtype)
    projector = make_projector(width=language.width)
    projector.match_rms(make_latents(), language.embedding_rms())
    return WorldModel(language, Projectors({"world": projector}), begins_with_bos=bos)


def make_input() -> ModelInput:
    """Three samples whose last three tokens are labels."""
    tokens, is_label = np.random.default_rng(0).integers(6, 20, (3, 9)), np.zeros((3, 9), bool)
    for row, length in enumerate((9, 5, 7)):
        tokens[row, length:] = 0
        is_label[row, length - 3 : length] = True
    sample, column = np.nonzero(is_label)
    return model_input({"world": make_latents(3)}, TextBatch(tokens, sample, column, tokens[sample, column]))


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
