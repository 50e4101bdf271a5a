"""VAEs with random weights, narrow ones and the full-size one with a small decoder; a Gemma 3 in two files."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file

from tests.precompute.encoders.towers import save_model


def random_vae(**config: Any) -> Any:
    """Make an AutoencoderKLWan whose gains and biases are as far from their initial values as trained ones are."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**{"decoder_base_dim": 8, **config}).eval().requires_grad_(False)
    for name, weight in vae.encoder.named_parameters():
        if name.endswith("gamma"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.1)
    return vae


narrow_vae = partial(random_vae, base_dim=8)


@pytest.fixture(scope="session")
def full_size_vae() -> Any:
    return random_vae()


@pytest.fixture
def vae() -> Any:
    """A narrow VAE with four channels, whose weights are exact in bfloat16."""
    return narrow_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).bfloat16().float()


@pytest.fixture
def gemma_of_two_files(tmp_path: Path) -> Path:
    """A checkpoint in two files, of which only the first, with the vision tower, is there."""
    folder = save_model("Gemma3ForConditionalGeneration", tmp_path / "gemma")
    held = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in held.items() if "tower" in name}, folder / "one.safetensors")
    files = {name: "one.safetensors" if "tower" in name else "two.safetensors" for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
    return folder
