"""Text models of multimodal checkpoints load alone, and compute as the whole models do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.answers import export_and_ask
from tests.trainer.conftest import MakeConfig
from tests.trainer.models import PROMPTS, assert_batched_as_alone, load, make_generator, make_latents
from tests.trainer.multimodal import CHECKPOINTS, save_checkpoint
from tests.trainer.runs import metrics, open_alone, train_alone
from trainer import load_projector
from trainer.config import TrainConfig
from trainer.generate.generator import TurnEnd
from trainer.model.load_language_model import load_with_whole


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
