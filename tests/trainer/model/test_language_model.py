"""A frozen language model computes as its own forward does, is refused if it would not, and saves memory exactly."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters

from cache_store.errors import ConfigError, ModelError
from tests.named import assert_names
from tests.trainer.conftest import save_language_model
from tests.trainer.models import BFLOAT16, FLOAT32, LAYER_TYPES, drop_weights, load, save_decoder
from trainer.model.kernels import attention_kernels, choose_attention
from trainer.model.language_model import LanguageModel
from trainer.model.projector import CAUSAL

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
