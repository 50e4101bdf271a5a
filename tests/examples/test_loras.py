"""The loops of diffusion models and of Wan, killed and resumed, print the losses of a run that was not stopped."""

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from cache_store.format.array import SizeRule
from cache_store.format.tables import CLIP_START
from tests.examples.test_examples import EXAMPLES, Steps, run, steps_in
from tests.make_cache import make_cache, text_recipe

STEPS = 30
CHANNELS, TOKENS, FEATURES = 4, 6, 8
SHAPES = [(11, (3, 4, 6)), (8, (3, 6, 4)), (6, (5, 4, 6))]
"""Clips, and frames, rows and columns of their latents."""
TEXTS = {
    "FLUX.1": {"t5": (7, 16), "pooled": (12,)},
    "Qwen-Image": {"qwen": (7, 16)},
    "SDXL": {"clip": (7, 8), "clip-2": (7, 12), "pooled": (12,)},
}
"""Texts of each family of images, by the names that the script gives them: shape of a sample."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_as_in_a_child")]


def save_transformer(folder: Path, channels: int, text_features: int) -> Path:
    """Save a transformer as a pipeline does, for latents of `channels` and texts of `text_features`."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
    latents = {"in_channels": channels, "out_channels": channels, "patch_size": (1, 2, 2)}
    model = WanTransformer3DModel(**heads, **latents, text_dim=text_features, freq_dim=16, ffn_dim=24)
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of clips and of images of several sizes and of their texts, and Wan's model in `wan`."""
    folder, random = tmp_path_factory.mktemp("loras"), np.random.default_rng(0)
    sizes = [random.standard_normal((count, CHANNELS, *cells), np.float32) for count, cells in SHAPES]
    make_cache(folder / "clips", sizes, clips=True, latents_std=[2.0] * CHANNELS)
    texts = random.standard_normal((sum(map(len, sizes)), TOKENS, FEATURES), np.float32)
    starts = {CLIP_START: [0.5 * row for row in range(len(texts))]}
    make_cache(folder / "texts", texts, text=text_recipe(TOKENS), extra=starts)
    sizes = [random.standard_normal((count, 4, *cells), np.float32) for count, cells in ((13, (8, 6)), (9, (4, 12)))]
    rule = SizeRule(preset="ours", resolution=64, min=32, max=128, step=16)
    make_cache(folder / "latents", sizes, image={"rule": rule})
    for name, shape in {name: shape for each in TEXTS.values() for name, shape in each.items()}.items():
        make_cache(folder / name, random.standard_normal((22, *shape), np.float32), text=text_recipe(7))
    return save_transformer(folder / "wan", CHANNELS, FEATURES).parent


def loop(family: str, caches: Path, out: Path, *more: object, clips: Path | str = "clips") -> list[object]:
    """Return the script of a family, and its options."""
    if family == "Wan":
        batches = ["--latents", caches / clips, "--text", caches / "texts", "--batch-size", 4]
        return ["wan_lora", caches / "wan", out, *batches, *more]
    texts = [f"--text={name}={caches / name}" for name in TEXTS[family]]
    return ["diffusers_lora", family, out, "--latents", caches / "latents", *texts, *more]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def whole(caches: Path, out: Path) -> Callable[[str], Steps]:
    """Trains a family without a stop."""
    return cache(lambda family: steps_in(run(*loop(family, caches, out / family, "--steps", STEPS))))


@pytest.mark.parametrize("family", [*TEXTS, "Wan"])
def test_a_run_that_was_stopped_twice_trains_as_one_that_was_not(family, caches, whole, tmp_path):
    assert sorted(whole(family)) == [*range(1, STEPS + 1)]
    assert whole(family)[1][0] != whole(family)[STEPS][0]
    found = Steps()
    for steps in (8, 17, STEPS):
        found |= steps_in(run(*loop(family, caches, tmp_path / "out", "--steps", steps, "--resume")))
    assert found == whole(family)


def test_the_pipeline_loads_the_lora(caches, whole, out):
    assert whole("Wan")
    trained = torch.load(out / f"Wan/step-{STEPS:06d}.pt", weights_only=True)["lora"]
    model = WanTransformer3DModel.from_pretrained(caches / "wan", subfolder="transformer")
    model.load_lora_adapter(out / "Wan/pytorch_lora_weights.safetensors", prefix="transformer", adapter_name="default")
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
