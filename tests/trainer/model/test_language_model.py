"""The frozen language model: every weight from the checkpoint, its own logits, and causal; or refused."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from cache_store.errors import ConfigError, ModelError
from tests.trainer.conftest import TINY, save_language_model
from trainer.model.language_model import LanguageModel, load_language_model

CPU = torch.device("cpu")


def load(folder: Path | str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_language_model(str(folder), dtype, CPU)


def refusal_of(folder: Path | str, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises((ConfigError, ModelError)) as caught:
        load(folder, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def drop_weights(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_loading_shows_no_bar_and_leaves_the_hubs(language_model, capfd):
    load(language_model)
    assert (capfd.readouterr().err, are_progress_bars_disabled()) == ("", False)


def test_a_multimodal_checkpoint_gives_its_whole_text_model(tmp_path):
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    markers = {"image_token_index": 20, "boi_token_index": 21, "eoi_token_index": 22}
    config = hf.Gemma3Config(text_config=TINY, vision_config=vision, mm_tokens_per_image=4, **markers)
    hf.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert type(model.decoder).__name__ == "Gemma3TextModel"
    assert not any("vision" in name for name, _ in model.named_parameters())
    drop_weights(tmp_path, "embed_tokens")
    assert " of its weights (" in refusal_of(tmp_path)


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path):
    drop_weights(save_language_model(tmp_path), "q_proj")
    assert "lacks 2 of its weights (model.layers.0.self_attn.q_proj.weight, " in refusal_of(tmp_path)


def save_decoder(folder: Path, kind: type[hf.PreTrainedConfig], **settings: object) -> Path:
    """A tiny model of another architecture, with random weights."""
    ours = {name: value for name, value in TINY.items() if name not in ("layer_types", "sliding_window", "head_dim")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(kind(**{**ours, **special, **settings})).save_pretrained(folder)
    return folder


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings", "scale"), SCALED.values(), ids=SCALED)
def test_losses_are_those_of_models_that_scale_their_logits(tmp_path, kind, settings, scale, dtype):
    folder = save_decoder(tmp_path, kind, **settings)
    model, full = load(folder, dtype), hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokens = torch.randint(model.config.vocab_size, (3, 9))
    expected = full(input_ids=tokens, labels=tokens).loss
    logits = model.logits(model.hidden(model.embed(tokens))[:, :-1])
    found = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    assert (model.width, model.max_tokens, model.logit_scale) == (32, 256, scale)
    assert torch.allclose(found, expected.float(), atol=1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (hf.BertConfig, {"is_decoder": True}, "in a way the trainer does not know"),
        (hf.Gemma4TextConfig, LAYER_TYPES, "fails when it runs on embeddings"),
    ],
)
def test_an_architecture_that_cannot_run_is_refused(tmp_path, kind, settings, reason):
    assert reason in refusal_of(save_decoder(tmp_path, kind, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path, dtype):
    assert "is not causal" in refusal_of(save_language_model(tmp_path, use_bidirectional_attention=True), dtype)


def test_the_embedding_rms_has_gemmas_scale_in_it(language_model):
    model = load(language_model)
    bare = model.embed.weight.double().square().mean().sqrt()
    assert model.embedding_rms() == pytest.approx(float(bare) * TINY["hidden_size"] ** 0.5, rel=1e-3)


def test_the_identity_follows_the_weights_and_not_the_precision(language_model, tmp_path):
    identity = load(language_model).identity()
    assert identity == load(language_model, torch.bfloat16).identity()
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
        gradients = []
        for model in (plain, compiled):
            leaf = torch.linspace(-1, 1, 2 * length * 32).view(2, length, 32).requires_grad_()
            model.hidden(leaf * 2).square().sum().backward()
            gradients.append(leaf.grad)
        assert torch.allclose(*gradients, atol=1e-5)
