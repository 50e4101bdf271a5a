"""A run with all that a run may have is the same however it is cut up: into parts, ranks and passes; and its sizes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store import open_cache
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.trainer.answers import export_and_ask, reported
from tests.trainer.conftest import MEAN, STD, MakeConfig, describe
from tests.trainer.runs import (
    assert_near_run,
    assert_same_run,
    command,
    metrics,
    open_alone,
    train_alone,
    train_on_two_ranks,
)
from trainer.cli import main
from trainer.config import ReconstructionConfig, TrainConfig
from trainer.model.model_config import TowerConfig
from trainer.run import session
from trainer.run.checkpoint import HEADS_FILE
from trainer.run.folder import checkpoints_of
from trainer.run.memory import largest_image
from trainer.run.parallel import World

SHAPES, ROWS = [(8, 3, 2), (8, 2, 2), (8, 1, 5)], [21, 14, 7]
TALK = [describe(row) for row in range(sum(ROWS))]


def save_views(home: Path) -> list[dict[str, str]]:
    """Save a plain and a flipped view of posteriors of three sizes, and the tokens of a vision tower."""
    random, views = np.random.default_rng(0), []
    scale = {"latents_mean": MEAN, "latents_std": STD, "posterior": "moments"}
    for name, rejected in (("plain", [3, 17]), ("flipped", [3, 30])):
        latents = [random.standard_normal((rows, *shape), np.float32) for rows, shape in zip(ROWS, SHAPES, strict=True)]
        own = {"conversations": TALK, "rejected": rejected, "image": {"flip": name == "flipped"}}
        views.append({"world": str(make_cache(home / name, latents, **own, **scale))})
    tokens = 3 * random.standard_normal((len(TALK), 6, 12), np.float32) + 1
    siglip = make_cache(home / "siglip", tokens, conversations=TALK, rejected=[5], samples_per_shard=16)
    return [{**view, "siglip": str(siglip)} for view in views]


@pytest.fixture(scope="module")
def make_full(configured_here: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """Make the config of a run whose learning rate does not depend on its length."""
    options = {
        "cache": save_views(tmp_path_factory.mktemp("caches")),
        "towers": {"siglip": TowerConfig(projector="linear", ends="none"), "world": TowerConfig(attention="full")},
        "reconstruction": ReconstructionConfig(weight=0.1, every=6),
        "shuffle_block": 2,
        "sample_captions": 2,
        "eval_batch_size": 4,
        "schedule": "constant",
        "warmup_steps": 0,
        "max_steps": 12,
    }
    return lambda name, **changes: configured_here(name, **{**options, **changes})


@pytest.fixture(scope="module")
def whole(make_full: MakeConfig) -> TrainConfig:
    return train_alone(make_full("whole"))


def test_a_run_trained_a_few_steps_at_a_time_is_the_run_trained_at_once(make_full, whole):
    """Cut before the first reconstruction, and between two."""
    for steps in (5, 10, 12):
        cut = train_alone(make_full("cut", max_steps=steps))
    assert_same_run(cut, whole)
    assert list(metrics(cut.run.folder, "reconstruction_loss")) == [6, 12]
    for key in ("reconstruction_loss", "captions"):
        assert metrics(cut.run.folder, key) == metrics(whole.run.folder, key)
    heads = [checkpoints_of(each.run).newest() / HEADS_FILE for each in (cut, whole)]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_ranks_and_passes_train_as_one_and_go_on_from_each_other(make_full, whole):
    train_alone(make_full("ddp", max_steps=5))
    train_on_two_ranks(make_full("ddp", max_steps=10, accumulate=2, offload=True))
    last = train_alone(make_full("ddp"))
    assert_near_run(last, whole, "loss", "reconstruction_loss", "val_loss", "val_loss_shuffled", "val_accuracy")
    assert list(metrics(last.run.folder, "captions")) == [5, 10, 12]


def note_parts() -> None:
    """Write the bytes of each weight that the rank holds, and the weight's bytes in all, into a file."""
    load = session.load_sharded

    def noted(*given):
        model, full = load(*given)
        lines = (f"{name} {each.to_local().nbytes} {each.nbytes}" for name, each in model.named_parameters())
        Path(f"held-{given[-1].rank}").write_text("\n".join(lines))
        return model, full

    session.load_sharded = noted


def test_two_ranks_with_parts_of_the_language_model_train_as_one_with_all_of_it(
    make_full, whole, tmp_path, monkeypatch
):
    """Validation and chunks of labels take three passes on one rank and two on the other."""
    monkeypatch.chdir(tmp_path)
    options = {"parallel": "fsdp2", "eval_batch_size": 3, "loss_chunk": 5, "gradient_checkpointing": "selective"}
    train_alone(make_full("fsdp2", max_steps=5))
    train_on_two_ranks(make_full("fsdp2", max_steps=10, accumulate=2, **options), note_parts, note_parts)
    last = train_alone(make_full("fsdp2", parallel="fsdp2"))
    assert_near_run(last, whole, "loss", "reconstruction_loss", "val_loss", "val_loss_shuffled", "val_accuracy")
    assert list(metrics(last.run.folder, "captions")) == [5, 10, 12]
    held = [[line.split() for line in (tmp_path / f"held-{rank}").read_text().splitlines()] for rank in (0, 1)]
    for (name, first, whole_bytes), (_, second, _) in zip(*held, strict=True):
        assert int(first) + int(second) == int(whole_bytes), name
        assert max(int(first), int(second)) <= int(whole_bytes) / 2 + 128, name  # at most an odd row more


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "in blocks", "full"])
def test_any_world_size_and_accumulation_sees_the_same_batches(configured_here, make_full, kind):
    configs = {"plain": configured_here(), "in blocks": configured_here(shuffle_block=4), "full": make_full("run")}
    opened = open_alone(configs[kind])
    whole = opened.loader(7)
    for world_size, accumulate in [(1, 2), (2, 1), (4, 2)]:
        worlds = (World(rank=rank, size=world_size, device=opened.world.device) for rank in range(world_size))
        batches = [replace(opened.make_loader(each), accumulate=accumulate)(7) for each in worlds]
        for name, latents in whole.micro_batches[0].latents.items():
            parts = [part.latents[name] for batch in batches for part in batch.micro_batches]
            assert torch.equal(torch.cat(parts), latents)
            assert {len(part) for part in parts} == {8 // (world_size * accumulate)}
        assert {batch.label_tokens for batch in batches} == {whole.label_tokens}


SIZED, COUNTS = [(4, 3, 2), (4, 2, 2), (4, 1, 5)], [21, 14, 7]
FEW = {"epochs": 2, "batch_size": 4, "val_fraction": 0.3, "eval_batch_size": 4}


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("sized") / "cache"
    latents = [random.standard_normal((rows, *shape), np.float32) for rows, shape in zip(COUNTS, SIZED, strict=True)]
    conversations = [describe(row) for row in range(sum(COUNTS))]
    return make_cache(path, latents, conversations=conversations, rejected=[3, 17], dtype="float32")


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig, sized: Path) -> TrainConfig:
    return train_alone(configured_here("sized", cache=sized, sample_captions=12, **FEW))


def test_eval_captions_and_answers_take_each_image_in_its_size(trained, sized, tmp_path, capsys):
    captions = metrics(trained.run.folder, "captions")
    rows, spec = [each["row"] for each in [*captions.values()][-1]], open_cache(sized).spec
    assert {*spec.array_indices[[spec.shard_of_row(row) for row in rows]]} == {0, 1, 2}
    capsys.readouterr()
    assert main(command(trained, "eval")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["own"] == pytest.approx([*metrics(trained.run.folder, "val_loss").values()][-1])
    ask = trained.run.folder, tmp_path / "report.json", "--max_tokens=4", "--rows=41,0,1,25,24,2"
    assert reported(*ask) == reported(*ask, "--batch_size=1")
    for row in (1, 41):
        assert_names(export_and_ask(trained, tmp_path / str(row), rows=(row,)), "up to 8 tokens")


def test_the_largest_images_are_tried_for_memory(configured, sized):
    session = open_alone(configured(cache=sized, **FEW))
    assert session.cache.first.array_indices(np.array([largest_image(session)])) == [0]
    train_alone(configured("fitted", cache=sized, fit_memory=True, max_steps=2, **FEW))
