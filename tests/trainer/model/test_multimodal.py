"""Text models of multimodal checkpoints load alone, and compute as the whole models do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file

from tests.trainer.answers import export_and_ask
from tests.trainer.conftest import MakeConfig
from tests.trainer.models import PROMPTS, assert_batched_as_alone, load, make_generator, make_latents
from tests.trainer.multimodal import CHECKPOINTS, save_checkpoint
from tests.trainer.runs import metrics, open_alone, train_alone
from trainer import load_projector
from trainer.config import TrainConfig
from trainer.generate.generator import TurnEnd
from trainer.model.load_language_model import load_with_whole
from trainer.model.pretrained import loading_bar_hidden

WEIGHTS = "model.safetensors"
DECODERS = {
    "qwen2_vl": "Qwen2VLTextModel",
    "qwen2_5_vl": "Qwen2_5_VLTextModel",
    "qwen3_vl": "Qwen3VLTextModel",
    "qwen3_vl_moe": "Qwen3VLMoeTextModel",
    "llava": "LlamaModel",
    "llava_next": "LlamaModel",
    "llava_next_video": "LlamaModel",
    "llava_onevision": "Qwen2Model",
    "paligemma": "GemmaModel",
    "paligemma2": "Gemma2Model",
    "llama4": "Llama4TextModel",
    "gemma3": "Gemma3TextModel",
}


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
    assert type(model.decoder).__name__ == DECODERS[kind]
    for entering, embeddings_NTD in (
        ({"input_ids": tokens_NT}, model.embed(tokens_NT)),
        ({"inputs_embeds": drawn_NTD}, drawn_NTD),
    ):
        theirs = text_of_whole(kind, whole, **entering)
        with torch.no_grad():
            ours = model.logits(model.hidden(embeddings_NTD))
        atol = 2e-6 * float(theirs.abs().max()) if kind.startswith("paligemma") else 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


OWN_PROJECTOR = "multi_modal_projector.mm_"
"""Names of Gemma 3's projector, the only one that is read."""


def is_of_images(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "projector"))


def test_weights_of_its_vision_tower_are_never_read(saved, tmp_path, capfd):
    """Nor does anything report them as left over, or hide the Hub's progress bar."""
    folder, _ = saved
    capfd.readouterr()
    model, whole = load_with_whole(str(folder), torch.float32, torch.device("cpu"))
    assert (capfd.readouterr().err, hf.utils.logging.is_progress_bar_enabled()) == ("", True)
    with loading_bar_hidden():
        assert not are_progress_bars_disabled()
    assert {id(each) for each in whole.parameters()} == {id(each) for each in model.parameters()}
    assert not any(is_of_images(name) for name, _ in whole.named_parameters())
    weights = load_file(folder / WEIGHTS)
    text = {name: each for name, each in weights.items() if not is_of_images(name) or OWN_PROJECTOR in name}
    assert len(text) < len(weights)
    save_file(text, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert load(tmp_path).identity() == model.identity()


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
