"""The loop of Wan over clips of several sizes, stopped and resumed, prints the losses of a run that was not stopped."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from cache_store import open_joined
from cache_store.format.tables import CLIP_START
from tests.examples.test_examples import EXAMPLES, Steps, end, kill_at, run, start, steps_in
from tests.examples.wan_model import save_transformer
from tests.make_cache import make_cache, text_recipe

STEPS = 30
CHANNELS, TOKENS, FEATURES = 4, 6, 8
SHAPES = [(11, (3, 4, 6)), (8, (3, 6, 4)), (6, (5, 4, 6))]
"""Clips, and frames, rows and columns of their latents."""

pytestmark = pytest.mark.usefixtures("threads_as_in_a_child")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of clips of several sizes and of their texts, and the model in `wan`."""
    folder, random = tmp_path_factory.mktemp("wan"), np.random.default_rng(0)
    sizes = [random.standard_normal((count, CHANNELS, *cells), np.float32) for count, cells in SHAPES]
    make_cache(folder / "clips", sizes, clips=True, latents_std=[2.0] * CHANNELS)
    texts = random.standard_normal((sum(map(len, sizes)), TOKENS, FEATURES), np.float32)
    starts = {CLIP_START: [0.5 * row for row in range(len(texts))]}
    make_cache(folder / "texts", texts, text=text_recipe(TOKENS), extra=starts)
    return save_transformer(folder / "wan", CHANNELS, FEATURES).parent


def options(caches: Path, out: Path, *more: object, clips: str = "clips") -> list[object]:
    batches = ["--latents", caches / clips, "--text", caches / "texts", "--batch-size", 4]
    return [caches / "wan", out, *batches, *more]


@pytest.fixture(scope="module")
def out(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "out"


@pytest.fixture(scope="module")
def uninterrupted(caches: Path, out: Path) -> Steps:
    return steps_in(run("wan_lora", *options(caches, out, "--steps", STEPS)))


def test_a_run_that_was_stopped_twice_trains_as_one_that_was_not(caches, uninterrupted, tmp_path):
    assert sorted(uninterrupted) == [*range(1, STEPS + 1)]
    assert uninterrupted[1][0] != uninterrupted[STEPS][0]
    found = Steps()
    for steps in (8, 17, STEPS):
        found |= steps_in(run("wan_lora", *options(caches, tmp_path / "out", "--steps", steps, "--resume")))
    assert found == uninterrupted


def test_a_killed_run_goes_on_from_its_last_checkpoint(caches, uninterrupted, tmp_path):
    command = options(caches, tmp_path / "out", "--steps", STEPS)
    kill_at(27, start("wan_lora", 1, *command))
    resumed = steps_in(end(start("wan_lora", 1, *command, "--resume")))
    assert resumed == {step: uninterrupted[step] for step in range(26, STEPS + 1)}


def test_each_batch_has_clips_of_one_size(caches, uninterrupted):
    cache = open_joined({"clips": caches / "clips", "texts": caches / "texts"}).caches["clips"]
    shapes = set()
    for _, numbers in uninterrupted.values():
        shapes.add(cache.array_of(np.array([int(each) for each in numbers.split(",")])).shape)
    assert shapes == {(CHANNELS, *cells) for _, cells in SHAPES}


def test_the_pipeline_loads_the_lora(caches, uninterrupted, out):
    trained = torch.load(out / f"step-{STEPS:06d}.pt", weights_only=True)["lora"]
    model = WanTransformer3DModel.from_pretrained(caches / "wan", subfolder="transformer")
    model.load_lora_adapter(out / "pytorch_lora_weights.safetensors", prefix="transformer", adapter_name="default")
    loaded = model.state_dict()
    assert all(value.any() for value in trained.values())
    for name, value in trained.items():
        torch.testing.assert_close(loaded[name.replace(".weight", ".default.weight")], value)


def test_noise_and_times_are_those_of_the_pipelines_scheduler(caches):
    add_noise = runpy.run_path(str(EXAMPLES / "wan_lora.py"))["add_noise"]
    clean, random = torch.randn(5, CHANNELS, 3, 4, 6), torch.Generator().manual_seed(0)
    noisy, times, velocity = add_noise(clean, 3.0, random)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=(times / 1000).sort(descending=True).values.tolist())
    order = times.argsort(descending=True)
    torch.testing.assert_close(scheduler.timesteps, times[order])
    expected = scheduler.scale_noise(clean[order], times[order], (clean + velocity)[order])
    torch.testing.assert_close(noisy[order], expected)


def test_what_cannot_be_trained_is_refused_in_a_line(caches, tmp_path, capsys):
    starts = {CLIP_START: [0.5 * row for row in range(25)]}
    make_cache(tmp_path / "images", np.zeros((25, CHANNELS, 4, 6), np.float32), extra=starts)
    make_cache(tmp_path / "others", np.zeros((25, 2 * CHANNELS, 3, 4, 6), np.float32), clips=True)
    make_cache(tmp_path / "odd", np.zeros((25, CHANNELS, 3, 4, 5), np.float32), clips=True)
    refused = {
        "images": "its samples are no clips",
        "others": "'channel': 8",
        "odd": "not whole patches",
        "absent": "absent",
    }
    for name, problem in refused.items():
        with pytest.raises(SystemExit, match="1"):
            run("wan_lora", *options(caches, tmp_path / "out", clips=tmp_path / name))
        error = capsys.readouterr().err
        assert (error.count("\n"), problem in error) == (1, True), error
    with pytest.raises(SystemExit, match="1"):
        run("wan_lora", *options(caches, tmp_path))
    assert capsys.readouterr().err == f"wan_lora.py: error: {tmp_path} exists; add --resume to continue it\n"
