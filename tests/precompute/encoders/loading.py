"""Small encoders on a CPU in float32, and pictures for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precompute.encoders.encoder import PixelRange
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder

Spoil = Callable[[Path], object]


def load(model: Path | str, pixel_range: PixelRange = "signed", **options: Any) -> Any:
    options = {"device": "cpu", "compute_dtype": "float32", **options}
    return load_encoder(EncoderConfig(model=str(model), **options), pixel_range)


def photos(height: int, width: int, number: int = 2) -> Tensor:
    """Make random pictures, uint8 [N, Y, X, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, height, width, 3), dtype=torch.uint8, generator=generator)


def signed(image_NYX3: Tensor) -> Tensor:
    """Return pictures as a model takes them: [N, 3, Y, X] in [-1, 1]."""
    return image_NYX3.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def changed_weights(file: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    return lambda folder: save_file(change(load_file(folder / file)), folder / file, {"format": "pt"})


def changed_config(file: str = "config.json", **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil
