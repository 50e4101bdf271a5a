"""Every command of the guides for diffusion and video models, as typed, on small models, photographs and videos."""

import re
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL
from PIL import Image

from cache_store import open_cache, open_joined
from precompute.cli import PROGRAM
from tests.examples.test_examples import run_guide
from tests.examples.test_loras import save_transformer
from tests.precompute.encoders.test_vaes import NARROW_WAN
from tests.precompute.encoders.text_models import FEATURES, save_text_encoder
from tests.videos import make_video

IMAGES_GUIDE = Path(__file__).parents[2] / "docs/guide/diffusion.md"
IMAGES_MODEL = "black-forest-labs/FLUX.1-dev"
SMALL_IMAGES = {
    "build": "--encoder.compute_dtype float32 --image.buckets.resolution 64 --image.buckets.min 32 "
    "--image.buckets.step 16 --encoder.batch_size 2",
    "texts": "--compute_dtype float32",
}
"""Options that make the builds of each command small."""


def write_photos(folder: Path) -> None:
    folder.mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), np.uint8)
        size = [(90, 60), (60, 90), (80, 80), (150, 50)][number % 4]
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"p{number:02d}.jpg")
        (folder / f"p{number:02d}.txt").write_text(f"A picture with the number {number}.")


def save_image_models(folder: Path) -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = AutoencoderKL(**blocks, block_out_channels=[8] * 4, norm_num_groups=4, latent_channels=4, shift_factor=0.1)
    vae.save_pretrained(folder / "vae")
    save_text_encoder("CLIPTextModel", folder)
    save_text_encoder("T5EncoderModel", folder, "_2")


@pytest.mark.slow
def test_every_command_of_the_guide_for_diffusion_models_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_photos(Path("photos"))
    save_image_models(tmp_path / IMAGES_MODEL)
    run_guide(IMAGES_GUIDE.read_text(), lambda words: SMALL_IMAGES.get(words[0], "").split())
    latents = open_cache("data/latents")
    assert len(latents.arrays) == 4
    assert len(open_joined({"latents": latents, "t5": "data/text/t5", "pooled": "data/text/pooled"})) == 12
    assert Path("data/latents.html").stat().st_size > 10_000


GUIDE = (Path(__file__).parents[2] / "docs/guide/video.md").read_text()
MODEL = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
CHANNELS = 16
SMALL_SIZE = ["--image.height", "48", "--image.width", "64"]
SMALL = {
    "estimate": [*SMALL_SIZE, "--clip.frames", "17", "--encoder.compute_dtype", "float32", "--seconds", "1"],
    "build": [*SMALL_SIZE, "--clip.frames", "17", "--encoder.compute_dtype", "float32"],
    "texts": ["--compute_dtype", "float32"],
}
"""Options that make the builds of each command small."""
ROW = re.compile(
    r"^\| ([\w. -]+) \| \dk \+ 1 \| ([\d× ]+) \| ([\d× ]+) \| ([\d.]+) MB \| ([\d.]+) TB \|$", re.MULTILINE
)
"""A model, its clip, its latent, and the sizes of one and of 100,000."""

pytestmark = pytest.mark.usefixtures("threads_as_in_a_child")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(**NARROW_WAN).save_pretrained(folder / "vae")
    save_text_encoder("UMT5EncoderModel", folder)
    save_transformer(folder, CHANNELS, FEATURES)


def write_videos(folder: Path) -> None:
    """Write `a`, which a table cuts, and others of several lengths and aspects, with captions."""
    folder.mkdir()
    sizes = {"a": (96, (64, 48)), "b": (60, (48, 64)), "c": (40, (64, 48)), "d": (60, (64, 48))}
    for name, (frames, size) in sizes.items():
        make_video(folder / f"{name}.mp4", frames=frames, size=size)
        (folder / f"{name}.txt").write_text(f"A scene of {frames} frames.")


def small(words: list[str]) -> list[str]:
    if "buckets.yaml" not in words:
        return SMALL.get(words[0], [])
    rule = {"pixels": 3072, "min": 32, "max": 96, "step": 16}
    sizes = [option for name, value in rule.items() for option in (f"--image.buckets.{name}", str(value))]
    return [*sizes, "--clip.frames", "[1, 17, 33]", "--encoder.compute_dtype", "float32"]


@pytest.mark.slow
def test_every_command_of_the_guide_for_video_models_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_videos(Path("videos"))
    save_models(tmp_path / MODEL)
    clips, _, buckets = blocks("yaml")
    for name, text in (("clips.yaml", clips), ("buckets.yaml", buckets), ("scenes.csv", *blocks("csv"))):
        Path(name).write_text(text)
    run_guide(GUIDE, small)
    assert len(open_joined({"clips": "data/clips", "text": "data/text/umt5"})) == 4
    assert Path("data/clips.html").stat().st_size > 10_000
    scenes = open_cache("data/scenes").samples(np.arange(2), ["id", "clip_start"])
    assert scenes.to_pylist() == [{"id": "a-1", "clip_start": 0.0}, {"id": "a-2", "clip_start": 2.5}]
    assert {each.size.frames for each in open_cache("data/buckets").spec.arrays} == {17, 33}


def test_each_config_is_one_that_its_model_takes(tmp_path):
    clips, others, buckets = blocks("yaml")
    whole = yaml.safe_load(clips)
    families = re.findall(r"^# (.*)$", others, re.MULTILINE)
    configs = {"Wan 2.1": whole, **dict(zip(families, yaml.safe_load_all(others), strict=True))}
    sizes = {}
    for model, changed in {**configs, "buckets": yaml.safe_load(buckets)}.items():
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**whole, **changed}))
        config = PROGRAM.parse(["build", "--config", str(tmp_path / "config.yaml")]).config
        sizes[model] = (config.clip.frames, config.image.width, config.image.height)
    table = {model: tuple(map(int, clip.split(" × "))) for model, clip, *_ in ROW.findall(GUIDE)}
    assert {model: sizes[model] for model in configs} == {model: table[model] for model in configs}
