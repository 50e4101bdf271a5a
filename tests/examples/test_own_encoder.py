"""An encoder by import path builds, verifies and audits a cache; a mistake in one is told in one line."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store import normalize, open_cache
from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.format.array import Size
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_decoder, load_encoder
from precompute.images.config import ImageConfig
from tests.precompute.conftest import run_build, write_source

EXAMPLES = Path(__file__).parents[2] / "examples"
PATH = "own_encoder:PatchColours"


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example and a user's module importable, as PYTHONPATH does."""
    (tmp_path / "mine.py").write_text(MINE)
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("mine", None)


def test_the_example_builds_a_cache_that_verifies_and_audits(tmp_path):
    cache = run_build(tmp_path, write_source(tmp_path / "source"), Path(PATH), image__width=48)
    opened = open_cache(cache)
    assert opened.arrays[0].named(opened.arrays[0].shape) == "token 6, feature 6"
    assert opened.spec.array.encoder.class_name == PATH
    assert not verify(cache, "full").findings
    assert main(["audit", str(cache), "--samples", "20", "--seed", "0"]) == 0
    with pytest.raises(ConfigError, match="own_encoder:PatchColours states no normalisation"):
        opened.read(np.arange(2), normalize=True)


MINE = """
import torch
class NoLayout:
    identity = "1"
    def __init__(self, device, dtype): pass
    def encode(self, pixels): return pixels[:, :, 0]
class Wrong(NoLayout):
    def layout(self, size): return {"channel": 3, "latent_y": size.height // 2, "latent_x": size.width}
class Pixels(Wrong):
    def layout(self, size): return {"channel": 3, "latent_y": size.height, "latent_x": size.width}
    def decode(self, samples): return samples
class Scaled(Pixels):
    normalization = {"latents_shift": 1.0, "latents_std": [1, 2, 4]}
class ManyMeans(Pixels):
    normalization = {"latents_mean": [0, 0, 0, 0]}
class Clip(NoLayout):
    def layout(self, size):
        if size.frames % 2: raise ValueError(f"clip.frames must be even, got {size.frames}")
        return {"channel": 3, "latent_t": size.frames // 2, "latent_y": size.height, "latent_x": size.width}
    def encode(self, pixels): return pixels[:, :, ::2]
"""


def load(path: str, pixel_range: str = "signed") -> Encoder:
    config = EncoderConfig(model=path, device="cpu", compute_dtype="float32")
    return load_encoder(config, ImageConfig(range=pixel_range).recipe)


@pytest.mark.parametrize(
    ("path", "frames", "message"),
    [
        ("os:system", 1, "os:system is no class; expected one with identity, layout, encode"),
        ("mine:Wrong", 1, r"encode gave \(1, 3, 8, 8\), and its layout says \(1, 3, 4, 8\)"),
        ("mine:ManyMeans", 1, "mine:ManyMeans: normalization: latents_mean has 4 values, expected 3, one per channel"),
        (PATH, 5, f"encoder.model {PATH}: colours are those of one frame; leave clip out"),
        ("mine:Clip", 5, "encoder.model mine:Clip: clip.frames must be even, got 5"),
    ],
)
def test_a_mistake_in_an_encoder_is_one_line(path, frames, message):
    with pytest.raises(EncodeOnceError, match=message) as caught:
        load(path).encode(torch.zeros(1, frames, 8, 8, 3, dtype=torch.uint8))
    assert "\n" not in str(caught.value)


def test_an_encoders_own_decoder_is_used():
    encoder = load("mine:Pixels")
    decode, digest = load_decoder(EncoderConfig(model="mine:Pixels", device="cpu", compute_dtype="float32"))
    assert digest == encoder.identity.weights_sha256
    pixels = encoder.encode(torch.full((1, 1, 8, 8, 3), 255, dtype=torch.uint8))
    assert torch.equal(decode(pixels), torch.ones(1, 3, 8, 8))
    with pytest.raises(EncodeOnceError, match="has no decoder: its class has no decode"):
        load_decoder(EncoderConfig(model=PATH, device="cpu"))


def test_an_encoders_own_normalisation_is_recorded():
    found = normalize(np.ones((3, 1, 1), np.float32) * 5, load("mine:Scaled").identity)
    np.testing.assert_array_equal(found.ravel(), [4, 2, 1])


def test_an_encoder_may_take_clips():
    encoder = load("mine:Clip", "unit")
    assert encoder.array(Size(4, 8, 16)).shape == (3, 2, 8, 16)
    clips = torch.arange(2 * 4 * 8 * 16 * 3).remainder(256).to(torch.uint8).view(2, 4, 8, 16, 3)
    torch.testing.assert_close(encoder.encode(clips), clips[:, ::2].permute(0, 4, 1, 2, 3) / 255)
