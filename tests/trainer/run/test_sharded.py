"""Ranks that share the frozen language model: what they hold, and that they train as one that holds all of it."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.trainer.conftest import MakeConfig, describe
from tests.trainer.multimodal import FEATURES, PATCHES, save_gemma
from tests.trainer.runs import ALONE, end_well, fork_ranks, make_config, metrics
from trainer.config import TrainConfig
from trainer.insight.startup import held_bytes
from trainer.model.config import TowerConfig
from trainer.model.language_model import LanguageModel
from trainer.run import inputs
from trainer.run.folder import checkpoints_of
from trainer.train import train

SHARDED = {"parallel": "fsdp2", "eval_batch_size": 3, "loss_chunk": 5, "gradient_checkpointing": "selective"}
"""Shares of validation make three passes on one rank and two on the other, as do chunks of labels."""


@pytest.fixture(scope="module")
def whole(configured_here: MakeConfig) -> TrainConfig:
    config = configured_here("whole", sample_captions=3)
    train(config, ALONE)
    return config


def note_parts() -> None:
    """Write down beside a rank's run how many bytes of each weight it holds, and how many there are."""
    load = inputs.load_sharded

    def noted(*given):
        model, full = load(*given)
        weights = list(model.named_parameters())
        said = "\n".join(f"{name} {held_bytes(each)} {each.numel() * each.element_size()}" for name, each in weights)
        Path(f"held-{given[-1].rank}").write_text(said)
        return model, full

    inputs.load_sharded = noted


def test_two_ranks_that_share_the_language_model_train_as_one_that_holds_it(
    configured_here, whole, tmp_path, monkeypatch
):
    """Validated, captioned, and each going on from the other's checkpoint."""
    monkeypatch.chdir(tmp_path)
    config = configured_here("shared", sample_captions=3, **SHARDED)
    end_well(*fork_ranks(config, note_parts, note_parts))
    for key in ("loss", "val_loss", "val_loss_shuffled", "val_accuracy"):
        expected = metrics(whole.run.folder, key)
        assert metrics(config.run.folder, key) == pytest.approx(expected, rel=1e-4)
    assert metrics(config.run.folder, "captions") == metrics(whole.run.folder, "captions")
    held = [[line.split() for line in (tmp_path / f"held-{rank}").read_text().splitlines()] for rank in (0, 1)]
    for (name, *mine), (_, *other) in zip(*held, strict=True):
        (first, of), (second, _) = map(int, mine), map(int, other)
        assert first + second == of, name
        assert max(first, second) <= of / 2 + 128, name  # an odd row more, at most
    alone = configured_here("alone-after-shared", resume=str(checkpoints_of(config.run).path(5)))
    train(alone, ALONE)
    again = configured_here("shared-after-alone", resume=str(checkpoints_of(whole.run).path(5)), **SHARDED)
    end_well(*fork_ranks(again))
    expected = {step: loss for step, loss in metrics(whole.run.folder).items() if step > 5}
    for run in (alone, again):
        assert metrics(run.run.folder) == pytest.approx(expected, rel=1e-4)


def test_ranks_share_a_multimodal_checkpoint_and_each_has_its_projector(configured_here, tmp_path):
    """Rank 0 alone has read the projector; the tower of pretrained weights has embeddings of the checkpoint around."""
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
    train(alone, ALONE)
    end_well(*fork_ranks(shared))
    for key in ("loss", "val_loss"):
        assert metrics(shared.run.folder, key) == pytest.approx(metrics(alone.run.folder, key), rel=1e-4)


def test_one_rank_has_nothing_to_share(configured_here, whole, capfd):
    config = configured_here("one-rank", parallel="fsdp2", sample_captions=0)
    train(config, ALONE)
    assert metrics(config.run.folder) == metrics(whole.run.folder)
    assert "fsdp2: one rank, which holds the language model" in capfd.readouterr().out


def test_a_signal_to_one_rank_stops_all_that_share_the_model(configured_here):
    """Nearly all of its time goes into validation and captions, where no rank may stop without the others."""
    config = configured_here("stopped", sample_captions=8, eval_every=1, max_steps=100_000, parallel="fsdp2")
    log, ranks = config.run.folder / "metrics.jsonl", fork_ranks(config)
    ranks[0].until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 2)
    ranks[1].send_signal(signal.SIGTERM)
    for code, errors in [rank.end() for rank in ranks]:
        assert code == 3, errors
        assert "trainer: stopped: after step" in errors


def show_no_layers() -> None:
    LanguageModel.layers = lambda _: []


def test_a_model_without_layers_to_share_is_refused_in_one_line(configured_here):
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
def test_what_ranks_that_share_a_model_cannot_do_is_refused(configured_here, changes, message):
    with pytest.raises(inputs.ConfigError, match=message):
        configured_here("refused", parallel="fsdp2", **changes)
