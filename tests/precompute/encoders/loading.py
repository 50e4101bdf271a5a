"""Small encoders on a CPU in float32, and pictures for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_store.format.array import ClipRecipe, ImageRecipe, Size
from precompute.encoders.encoder import PixelRange
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig

Spoil = Callable[[Path], object]

CLIP = ClipRecipe(counts=(17,))


def image_recipe(pixel_range: PixelRange = "signed", **fields: Any) -> ImageRecipe:
    return msgspec.structs.replace(ImageConfig(range=pixel_range).recipe, **fields)


def load(model: Path | str, pixel_range: PixelRange = "signed", clip: ClipRecipe | None = None, **options: Any) -> Any:
    config = EncoderConfig(model=str(model), **{"device": "cpu", "compute_dtype": "float32", **options})
    image = image_recipe(pixel_range, **({"clip": clip} if clip else {}))
    return load_encoder(config, None if config.reads_text else image)


def shape_of(encoder: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
    """Return the shape of a sample of inputs of this size."""
    shape: tuple[int, ...] = encoder.array(Size(frames, height, width)).shape
    return shape


def photos(height: int, width: int, number: int = 2, frames: int = 1) -> Tensor:
    """Make random pictures, or clips, uint8 [N, T, Y, X, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, frames, height, width, 3), dtype=torch.uint8, generator=generator)


def signed(image_N1YX3: Tensor) -> Tensor:
    """Return pictures as a model takes them: [N, 3, Y, X] in [-1, 1]."""
    return image_N1YX3[:, 0].permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def changed_weights(file: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    return lambda folder: save_file(change(load_file(folder / file)), folder / file, {"format": "pt"})


def changed_config(file: str = "config.json", **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil
