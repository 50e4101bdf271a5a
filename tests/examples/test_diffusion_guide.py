"""Every command of the guide for diffusion models, as typed, on small models and photographs of many aspects."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from cache_store import open_cache, open_joined
from tests.examples.test_examples import run_guide
from tests.precompute.encoders.text_models import save_text_encoder

GUIDE = Path(__file__).parents[2] / "docs/guide/diffusion.md"
MODEL = "black-forest-labs/FLUX.1-dev"
SMALL = {
    "build": "--encoder.compute_dtype float32 --image.buckets.resolution 64 --image.buckets.min 32 "
    "--image.buckets.step 16 --encoder.batch_size 2",
    "texts": "--compute_dtype float32",
}
"""Options that make the builds of each command small."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_as_in_a_child")]


def write_photos(folder: Path) -> None:
    folder.mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), np.uint8)
        size = [(90, 60), (60, 90), (80, 80), (150, 50)][number % 4]
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"p{number:02d}.jpg")
        (folder / f"p{number:02d}.txt").write_text(f"A picture with the number {number}.")


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = AutoencoderKL(**blocks, block_out_channels=[8] * 4, norm_num_groups=4, latent_channels=4, shift_factor=0.1)
    vae.save_pretrained(folder / "vae")
    save_text_encoder("CLIPTextModel", folder)
    save_text_encoder("T5EncoderModel", folder, "_2")


def test_every_command_of_the_guide_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_photos(Path("photos"))
    save_models(tmp_path / MODEL)
    run_guide(GUIDE.read_text(), lambda words: SMALL.get(words[0], "").split())
    latents = open_cache("data/latents")
    assert len(latents.arrays) == 4
    assert len(open_joined({"latents": latents, "t5": "data/text/t5", "pooled": "data/text/pooled"})) == 12
    assert Path("data/latents.html").stat().st_size > 10_000
