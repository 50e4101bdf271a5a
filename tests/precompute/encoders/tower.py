"""A vision tower of the tests' own, registered as any encoder is: linear features of an image's patches."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import unfold

from cache_store.format.schema import EncoderIdentity, SampleLayout
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PixelRange
from precompute.encoders.identity import weights_sha256
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.registry import FAMILIES, Family
from precompute.encoders.spatial_factor import refuse_unfit

# Axes: N images, Y X pixels, P values of a patch, T tokens, F features.

PATCH, FEATURES = 8, 12
NATIVE = {
    "class_name": "ToyTower",
    "path": "native",
    "compiled": False,
    "posterior": "none",
    "compute_dtype": "float32",
}


class ToyTower:
    """Maps uint8 RGB to a token per patch, on one device."""

    def __init__(self, weight_PF: Tensor, digest: str, config: EncoderConfig) -> None:
        self.device, self._weight_PF = config.torch_device, weight_PF
        self.identity = EncoderIdentity(
            **NATIVE, weights_sha256=digest, batch_size=config.batch_size, latents_mean=(), latents_std=()
        )

    def layout(self, height: int, width: int) -> SampleLayout:
        refuse_unfit(height, width, PATCH)
        tokens = height * width // PATCH**2
        return SampleLayout(
            axes=("token", "feature"), shape=(tokens, FEATURES), feature_axis="feature", has_preview=False
        )

    def encode(self, image_NYX3: Tensor) -> Tensor:
        pixels_N3YX = image_NYX3.to(self.device).permute(0, 3, 1, 2).float() / 255
        patch_NTP = unfold(pixels_N3YX, PATCH, stride=PATCH).transpose(1, 2)
        return (patch_NTP @ self._weight_PF).contiguous()


def load_tower(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> ToyTower:
    weights = load_file(Path(files.model) / "model.safetensors")
    digest = weights_sha256(files.class_name, files.config, ["_class_name"], weights.items())
    return ToyTower(weights["weight"], digest, config)


def make_tower(folder: Path, seed: int = 0) -> Path:
    """A tower with random weights, as files."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    save_file({"weight": torch.randn(3 * PATCH**2, FEATURES, generator=generator)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "ToyTower"}))
    return folder


def register_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "ToyTower", lambda: Family(load_tower))
