"""Ranks that divide the frozen language model: each holds its part, and they train as one rank that holds all."""

from pathlib import Path

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.trainer.conftest import MakeConfig, describe
from tests.trainer.multimodal import FEATURES, PATCHES, save_gemma
from tests.trainer.runs import (
    assert_near_run,
    checkpoint,
    fork_ranks,
    make_config,
    metrics,
    train_alone,
    train_on_two_ranks,
)
from trainer.config import TrainConfig
from trainer.insight.startup import held_bytes
from trainer.model.language_model import LanguageModel
from trainer.model.model_config import TowerConfig
from trainer.run import inputs

SHARDED = {"parallel": "fsdp2", "eval_batch_size": 3, "loss_chunk": 5, "gradient_checkpointing": "selective"}
"""Validation and chunks of labels take three passes on one rank and two on the other."""


@pytest.fixture(scope="module")
def whole(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("whole", sample_captions=3))


def note_parts() -> None:
    """Write the bytes of each weight that the rank holds, and the weight's bytes in all, into a file."""
    load = inputs.load_sharded

    def noted(*given):
        model, full = load(*given)
        weights = list(model.named_parameters())
        lines = (f"{name} {held_bytes(each)} {each.numel() * each.element_size()}" for name, each in weights)
        Path(f"held-{given[-1].rank}").write_text("\n".join(lines))
        return model, full

    inputs.load_sharded = noted


def test_two_ranks_with_parts_of_the_language_model_train_as_one_with_all_of_it(
    configured_here, whole, tmp_path, monkeypatch
):
    """They validate and caption, and each run resumes from the other's checkpoint."""
    monkeypatch.chdir(tmp_path)
    config = configured_here("shared", sample_captions=3, **SHARDED)
    train_on_two_ranks(config, note_parts, note_parts)
    assert_near_run(config, whole, "loss", "val_loss", "val_loss_shuffled", "val_accuracy")
    assert metrics(config.run.folder, "captions") == metrics(whole.run.folder, "captions")
    held = [[line.split() for line in (tmp_path / f"held-{rank}").read_text().splitlines()] for rank in (0, 1)]
    for (name, first, whole_bytes), (_, second, _) in zip(*held, strict=True):
        assert int(first) + int(second) == int(whole_bytes), name
        assert max(int(first), int(second)) <= int(whole_bytes) / 2 + 128, name  # at most an odd row more
    alone = train_alone(configured_here("alone-after-shared", resume=checkpoint(config, 5)))
    assert_near_run(alone, whole, after=5)
    again = train_on_two_ranks(configured_here("shared-after-alone", resume=checkpoint(whole, 5), **SHARDED))
    assert_near_run(again, whole, after=5)


def test_ranks_divide_a_multimodal_checkpoint_and_each_has_its_projector(configured_here, tmp_path):
    """Rank 0 alone has read the projector; the pretrained tower has the checkpoint's embeddings around it."""
    tokens = np.random.default_rng(1).standard_normal((24, PATCHES, FEATURES), np.float32)
    cache = make_cache(tmp_path / "cache", tokens, conversations=[describe(row) for row in range(24)])
    towers = {"siglip": TowerConfig(projector="pretrained", trained=True)}
    language_model = save_gemma(tmp_path / "lm")
    alone, shared = (
        make_config(
            tmp_path, name, cache={"siglip": str(cache)}, language_model=language_model, towers=towers, max_steps=3,
            parallel=name,
        )
        for name in ("ddp", "fsdp2")
    )  # fmt: skip
    train_alone(alone)
    assert_near_run(train_on_two_ranks(shared), alone, "loss", "val_loss")


def test_one_rank_trains_as_without_fsdp(configured_here, whole, capfd):
    config = train_alone(configured_here("one-rank", parallel="fsdp2", sample_captions=0))
    assert metrics(config.run.folder) == metrics(whole.run.folder)
    assert "fsdp2: one rank, which holds the language model" in capfd.readouterr().out


def show_no_layers() -> None:
    LanguageModel.layers = lambda _: []


def test_a_model_without_known_layers_is_refused_in_one_line(configured_here):
    ended = [rank.end() for rank in fork_ranks(configured_here("none", parallel="fsdp2"), *[show_no_layers] * 2)]
    for _, error in ended:
        assert "Traceback" not in error
        assert "has no known layers for FSDP2 to divide among the ranks; set run.parallel: ddp" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fit_memory": True}, "run.fit_memory must be false with run.parallel: fsdp2"),
        ({"compile": "whole"}, "run.compile must be none or layers with run.parallel: fsdp2"),
    ],
)
def test_switches_that_ranks_with_parts_cannot_have_are_refused(configured_here, changes, message):
    with pytest.raises(inputs.ConfigError, match=message):
        configured_here("refused", parallel="fsdp2", **changes)
