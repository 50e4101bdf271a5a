"""A VAE's latents and Gemma 3's own vision tower train together, are exported and answer."""

import numpy as np
import pytest
import torch

from cache_store import open_joined
from tests.trainer.answers import export_and_ask
from tests.trainer.conftest import GEMMA_TEMPLATE, make_tokenizer
from tests.trainer.models import PROMPTS, assert_batched_as_alone
from tests.trainer.runs import assert_near_run, train_alone, train_on_two_ranks
from trainer import load_projector
from trainer.data.draws import as_tensors
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Generator, TurnEnd
from trainer.model.load_language_model import load_with_whole
from trainer.model.model import WorldModel
from trainer.model.model_config import TowerConfig
from trainer.text.chat import ChatTokenizer


@pytest.mark.parametrize(
    ("ranks", "changes"), [(1, {"gradient_checkpointing": "full", "accumulate": 2}), (2, {"parallel": "fsdp2"})]
)
def test_masks_change_no_loss_however_a_step_is_cut_up(home, towers, caches, configured_here, changes, ranks):
    pretrained = {"siglip": TowerConfig(projector="pretrained")}
    model = {"cache": caches, "language_model": home / "multimodal", "towers": pretrained}
    config = configured_here("-".join(changes) + str(ranks), **model, **changes, max_steps=3)
    (train_alone if ranks == 1 else train_on_two_ranks)(config)
    assert_near_run(config, towers, "loss", "val_loss", "val_loss_shuffled")


def test_a_frozen_tower_is_whole_in_the_file_and_as_it_was(home, towers):
    projector = load_projector(towers.run.folder)
    siglip, world = projector.config.towers
    assert (siglip.trained, siglip.attention, siglip.ends_from, siglip.tokens) == (False, "full", "checkpoint", 18)
    assert (world.trained, world.attention, world.ends_from, world.tokens) == (True, "causal", "learned", 22)
    language, _ = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    parts, own = language.image_parts, projector["siglip"].state_dict()
    assert torch.equal(own["weight"], parts.weight_FD)
    assert torch.equal(own["norm"], parts.norm_F)
    assert torch.equal(own["ends"], language.embed(torch.tensor([parts.boi, parts.eoi])))


def test_a_pretrained_tower_may_learn_too(home, caches, configured_here):
    towers = {"siglip": TowerConfig(projector="pretrained", trained=True)}
    config = train_alone(
        configured_here("learns", cache={"siglip": caches["siglip"]}, language_model=home / "multimodal", towers=towers)
    )
    (tower,) = (projector := load_projector(config.run.folder)).config.towers
    language, _ = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    moved = projector["siglip"].state_dict()
    assert tower.trained
    assert not torch.equal(moved["norm"], language.image_parts.norm_F)


def test_prompts_under_full_attention_go_in_padded_batches(home, towers, caches):
    """With cached keys: the words are those of whole sequences, one by one, as training reads them."""
    language, whole = load_with_whole(str(home / "multimodal"), torch.float32, torch.device("cpu"))
    model = WorldModel(language, load_projector(towers.run.folder), begins_with_bos=True)
    chat = ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, 64)
    generator = Generator(model, whole, chat, TurnEnd((), ""), GenerateConfig(rows="0", max_tokens=12))
    samples = as_tensors(open_joined(caches).read(np.arange(len(PROMPTS))))
    assert_batched_as_alone(generator, samples)


def test_the_exported_code_of_a_pretrained_tower_says_what_generate_says(towers, tmp_path):
    assert "its tokens attend to each other; not trained here" in export_and_ask(towers, tmp_path, [0])
