"""Ranks that divide the frozen language model: each holds its part, and they train as one rank that holds all."""

from pathlib import Path

import pytest

from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import assert_near_run, metrics, train_alone, train_on_two_ranks
from trainer.config import TrainConfig
from trainer.run import session

SHARDED = {"parallel": "fsdp2", "eval_batch_size": 3, "loss_chunk": 5, "gradient_checkpointing": "selective"}
"""Validation and chunks of labels take three passes on one rank and two on the other."""


@pytest.fixture(scope="module")
def whole(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("whole", sample_captions=3))


def note_parts() -> None:
    """Write the bytes of each weight that the rank holds, and the weight's bytes in all, into a file."""
    load = session.load_sharded

    def noted(*given):
        model, full = load(*given)
        weights = list(model.named_parameters())
        lines = (f"{name} {each.to_local().nbytes} {each.nbytes}" for name, each in weights)
        Path(f"held-{given[-1].rank}").write_text("\n".join(lines))
        return model, full

    session.load_sharded = noted


def test_two_ranks_with_parts_of_the_language_model_train_as_one_with_all_of_it(
    configured_here, whole, tmp_path, monkeypatch
):
    """They validate and caption too."""
    monkeypatch.chdir(tmp_path)
    config = configured_here("shared", sample_captions=3, **SHARDED)
    train_on_two_ranks(config, note_parts, note_parts)
    assert_near_run(config, whole, "loss", "val_loss", "val_loss_shuffled", "val_accuracy")
    assert metrics(config.run.folder, "captions") == metrics(whole.run.folder, "captions")
    held = [[line.split() for line in (tmp_path / f"held-{rank}").read_text().splitlines()] for rank in (0, 1)]
    for (name, first, whole_bytes), (_, second, _) in zip(*held, strict=True):
        assert int(first) + int(second) == int(whole_bytes), name
        assert max(int(first), int(second)) <= int(whole_bytes) / 2 + 128, name  # at most an odd row more


def test_one_rank_trains_as_without_fsdp(configured_here, whole):
    config = train_alone(configured_here("one-rank", parallel="fsdp2", sample_captions=0))
    assert metrics(config.run.folder) == metrics(whole.run.folder)
