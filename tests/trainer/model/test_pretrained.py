"""A multimodal checkpoint's own projector, from cached hidden states: what transformers computes from the pixels."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from cache_store import open_joined
from tests.make_cache import make_cache
from tests.trainer.conftest import TINY, make_tokenizer
from trainer.model.config import ModelConfig, TowerConfig
from trainer.model.load import load_language_model
from trainer.model.model import WorldModel
from trainer.model.towers import make_projectors

BOS, BOI, EOI, IMAGE = 1, 21, 22, 20
SIDE, TOKENS, FEATURES = 8, 16, 24
VISION = {
    "hidden_size": FEATURES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 14 * SIDE, "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 patches pooled to 16 tokens: more than the language model's sliding window of 12."""
    folder = tmp_path_factory.mktemp("multimodal")
    torch.manual_seed(0)
    markers = {"image_token_index": IMAGE, "boi_token_index": BOI, "eoi_token_index": EOI}
    text = {**TINY, "sliding_window": 12}
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=TOKENS, **markers)
    config.initializer_range = 0.3
    model = hf.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # transformers leaves it at zero
            if "multi_modal_projector" in name:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Any:
    return hf.Gemma3ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(3, 3, 14 * SIDE, 14 * SIDE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def states(whole: Any, pixels_N3YX: Tensor, *, pooled: bool) -> Tensor:
    """What the vision tower makes of images, [N, 64, F], or that pooled, [N, 16, F]."""
    states_NSF = whole.model.vision_tower(pixel_values=pixels_N3YX).last_hidden_state
    if not pooled:
        return states_NSF
    grid_NFYX = states_NSF.transpose(1, 2).reshape(len(states_NSF), FEATURES, SIDE, SIDE)
    return whole.model.multi_modal_projector.avg_pool(grid_NFYX).flatten(2).transpose(1, 2)


def make_model(checkpoint: Path, cache: Path, **form: Any) -> WorldModel:
    language = load_language_model(str(checkpoint), torch.float32, torch.device("cpu"))
    towers = {"siglip": TowerConfig(**{"projector": "pretrained", **form})}
    config = ModelConfig(language_model=str(checkpoint), towers=towers)
    caches = open_joined({"siglip": cache}).caches
    return WorldModel(language, make_projectors(config, caches, language, 0), begins_with_bos=True)


@pytest.mark.parametrize("pooled", [True, False])
@torch.no_grad()
def test_cached_hidden_states_give_what_the_pixels_give(checkpoint, whole, pixels, tmp_path, pooled):
    """Hidden states and logits of [BOS] <start_of_image> image <end_of_image> text, of texts of different lengths."""
    stored = states(whole, pixels, pooled=pooled)
    model = make_model(checkpoint, make_cache(tmp_path / "cache", stored.numpy(), dtype="float32"))
    tokens_NT = torch.tensor([[BOS, 7, 8, 9, 10, 11], [BOS, 12, 13, 0, 0, 0], [BOS, 14, 7, 15, 16, 0]])
    image = torch.tensor([BOI, *[IMAGE] * TOKENS, EOI]).expand(3, -1)
    ids_NT = torch.cat([tokens_NT[:, :1], image, tokens_NT[:, 1:]], 1)
    theirs = whole(
        input_ids=ids_NT, pixel_values=pixels, token_type_ids=(ids_NT == IMAGE).long(), output_hidden_states=True
    )
    ours_NTD = model.hidden({"siglip": stored}, tokens_NT)
    torch.testing.assert_close(ours_NTD, theirs.hidden_states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.language.logits(ours_NTD), theirs.logits, rtol=1e-5, atol=1e-5)
    causal = make_model(checkpoint, tmp_path / "cache", attention="causal").hidden({"siglip": stored}, tokens_NT)
    assert (causal - ours_NTD).abs().max() > 1e-2
