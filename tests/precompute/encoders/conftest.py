"""VAEs with random weights: narrow ones on disk, and the full-size one with next to no decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan


def random_vae(**config: Any) -> Any:
    """An AutoencoderKLWan whose gains and biases are as far from their initial values as trained ones are."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**{"decoder_base_dim": 8, **config}).eval().requires_grad_(False)
    for name, weight in vae.encoder.named_parameters():
        if name.endswith("gamma"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.1)
    return vae


@pytest.fixture(scope="session")
def full_size_vae() -> Any:
    return random_vae()


@pytest.fixture(scope="session")
def narrow_vae() -> Callable[..., Any]:
    """Makes one; keyword arguments override its config."""
    return lambda **config: random_vae(**{"base_dim": 8, **config})


@pytest.fixture
def vae_folder(narrow_vae: Callable[..., Any], tmp_path: Path) -> Path:
    """A pipeline's folder that holds a narrow VAE in its subfolder `vae`."""
    narrow_vae().save_pretrained(tmp_path / "pipeline" / "vae")
    return tmp_path / "pipeline"
