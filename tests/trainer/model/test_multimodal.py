"""Text models of multimodal checkpoints, and Gemma 3's own projector, compute as the whole models do."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from cache_store import open_joined
from cache_store.errors import ModelError
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.trainer.answers import export_and_ask
from tests.trainer.conftest import MakeConfig
from tests.trainer.models import (
    BOI,
    CHECKPOINTS,
    EOI,
    FEATURES,
    IMAGE,
    PATCHES,
    PROMPTS,
    SCALED,
    SIDE,
    TOKENS,
    assert_batched_as_alone,
    load,
    make_generator,
    make_latents,
    save_checkpoint,
    save_decoder,
    save_gemma,
)
from tests.trainer.runs import metrics, open_alone, train_alone
from trainer import load_projector
from trainer.config import TrainConfig
from trainer.generate.generator import TurnEnd
from trainer.model.load_language_model import load_with_whole, refuse_no_image_masks
from trainer.model.model import WorldModel
from trainer.model.model_config import ModelConfig, TowerConfig
from trainer.model.towers import make_projectors


@pytest.fixture(scope="module", params=CHECKPOINTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(kind)
    return folder, save_checkpoint(kind, folder)


def text_of_whole(kind: str, whole: Any, **entering: torch.Tensor) -> torch.Tensor:
    """Compute logits of text; PaliGemma is told that it is no prefix, and that positions begin at 0."""
    own = {"token_type_ids": torch.ones(2, 14, dtype=torch.long), "position_ids": torch.arange(14)[None]}
    with torch.no_grad():
        logits: torch.Tensor = whole(**entering, **own if kind.startswith("paligemma") else {}).logits
    return logits


def test_its_logits_are_those_of_the_whole_model_for_tokens_and_for_embeddings(kind, saved):
    """They are equal to the bit, except for PaliGemma, which has a mask where we have none."""
    folder, whole = saved
    tokens_NT = torch.randint(3, 20, (2, 14), generator=torch.Generator().manual_seed(0))
    drawn_NTD = torch.randn(2, 14, 32, generator=torch.Generator().manual_seed(1))
    model = load(folder)
    for entering, embeddings_NTD in (
        ({"input_ids": tokens_NT}, model.embed(tokens_NT)),
        ({"inputs_embeds": drawn_NTD}, drawn_NTD),
    ):
        theirs = text_of_whole(kind, whole, **entering)
        with torch.no_grad():
            ours = model.logits(model.hidden(embeddings_NTD))
        atol = 2e-6 * float(theirs.abs().max()) if kind.startswith("paligemma") else 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_only_its_text_model_is_left_of_the_whole(saved):
    model, whole = load_with_whole(str(saved[0]), torch.float32, torch.device("cpu"))
    assert {id(each) for each in whole.parameters()} == {id(each) for each in model.parameters()}
    assert not any(part in name for name, _ in whole.named_parameters() for part in ("vision", "visual", "projector"))


@pytest.fixture(scope="module")
def trained(kind: str, saved: tuple[Path, Any], configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here(kind, language_model=saved[0], max_steps=3, sample_captions=1))


def test_a_few_steps_train_its_projector_alone(kind, trained):
    assert len(losses := metrics(trained.run.folder)) == 3
    assert all(math.isfinite(loss) for loss in losses.values())
    after, session = load_projector(trained.run.folder), open_alone(trained)
    before = session.model.projectors["world"].state_dict()
    moved = {name for name, each in after["world"].state_dict().items() if not torch.equal(each, before[name])}
    assert moved == {"ends", *(f"layers.{n}.{part}" for n in (0, 2) for part in ("weight", "bias"))}
    assert session.model.language.identity() == after.config.language_model.identity
    assert after.config.text.begins_with_bos == (not kind.startswith("qwen"))


def test_its_exported_code_says_what_generate_says(trained, tmp_path):
    export_and_ask(trained, tmp_path)


@pytest.mark.parametrize("attention", ["causal", "full"])
def test_a_padded_batch_with_cached_keys_says_what_each_says(saved, attention):
    folder, _ = saved
    generator = make_generator(folder, end=TurnEnd((), ""))
    generator.model.projectors.full = frozenset(["world"] if attention == "full" else [])
    assert_batched_as_alone(generator, {"world": make_latents(len(PROMPTS))})


BOS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("multimodal"))


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Any:
    return hf.Gemma3ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def states(whole: Any, pixels_N3YX: Tensor, *, pooled: bool) -> Tensor:
    """Compute the vision tower's hidden states, [N, 64, F], or pooled ones, [N, 16, F]."""
    states_NSF = whole.model.vision_tower(pixel_values=pixels_N3YX).last_hidden_state
    if not pooled:
        return states_NSF
    grid_NFYX = states_NSF.transpose(1, 2).reshape(len(states_NSF), FEATURES, 8, 8)
    return whole.model.multi_modal_projector.avg_pool(grid_NFYX).flatten(2).transpose(1, 2)


def make_model(checkpoint: Path, cache: Path, **form: Any) -> WorldModel:
    language, _ = load_with_whole(str(checkpoint), torch.float32, torch.device("cpu"))
    towers = {"siglip": TowerConfig(**{"projector": "pretrained", **form})}
    config = ModelConfig(language_model=str(checkpoint), towers=towers)
    caches = open_joined({"siglip": cache}).caches
    return WorldModel(language, make_projectors(config, caches, language, 0), begins_with_bos=True)


@pytest.mark.parametrize("pooled", [True, False])
@torch.no_grad()
def test_cached_hidden_states_give_what_the_pixels_give(checkpoint, whole, pixels, tmp_path, pooled):
    """The sequence is [BOS] <start_of_image> image <end_of_image> text; texts differ in length."""
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


def test_what_the_checkpoint_cannot_project_is_refused(checkpoint, language_model, tmp_path):
    other = make_cache(tmp_path / "other", np.ones((3, TOKENS, 8), np.float32))
    shapes = f"[{PATCHES}, {FEATURES}] [{TOKENS}, {FEATURES}]"
    for model, names in ((checkpoint, shapes), (language_model, str(language_model))):
        with pytest.raises(ModelError) as caught:
            make_model(model, other)
        assert_names(caught.value, names)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["none", "soft cap", "cohere2", "gpt2", "granite"])
def test_full_attention_is_only_among_an_images_tokens(tmp_path, model):
    """Text attends to earlier tokens, and an image's tokens to each other, but to none after the image."""
    kind, settings = SCALED[model]
    language = load(save_decoder(tmp_path, kind, **settings, initializer_range=0.3))
    refuse_no_image_masks(language, "it")
    block_1T = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    drawn_1TD = torch.randn(1, 8, language.width, generator=torch.Generator().manual_seed(0))
    seen = [(1, 1), (2, 1), (3, 1), (4, 4), (6, 5), (7, 7)]
    for changed, first in seen:
        other_1TD = drawn_1TD.clone()
        other_1TD[:, changed] *= -1
        with torch.no_grad():
            change_1TD = language.hidden(other_1TD, block_1T) - language.hidden(drawn_1TD, block_1T)
        moved = change_1TD.abs().amax((0, 2)) > 1e-6
        assert moved.tolist() == [place >= first for place in range(8)]
