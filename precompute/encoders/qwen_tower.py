"""The vision tower of a Qwen-VL, as transformers runs it, at a fixed size: tokens of its merger, or a deepstack level.

Qwen3-VL's language model adds the tokens of deepstack levels to the output of its first layers; each level is a cache.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cache_store.errors import ModelError
from cache_store.format.array import SampleLayout, Size
from precompute.encoders.encoder import (
    PIXEL_RANGES,
    Encoder,
    PixelRange,
    TowerLocation,
    layout_of_tokens,
    refuse_cropping,
    still_in_range,
)
from precompute.encoders.encoder_config import VISION_CONFIG, EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.tower import one_layer, read_whole_tower, tower_config, weights_of_output
from precompute.encoders.weights import model_errors, native_identity

# Axes: N images, Y X pixels, T tokens, F features, G squares of patches, S patches of a square's side, P pixels.


class QwenEncoder(Encoder):
    def __init__(
        self, files: ModelFiles, location: TowerLocation, config: EncoderConfig, pixel_range: PixelRange
    ) -> None:
        with model_errors(files):
            # older configs state the whole model's type
            values = {**location.tower_values(files.config), "model_type": location.kinds[0]}
            held = replace(files, config={VISION_CONFIG: values})
            tower = read_whole_tower(held, location, tower_config(held, location))
        layer = one_layer(config, None)
        self._level = None if layer is None else level_of(files, tower.config, layer)
        self.device = config.torch_device
        name, digest = type(tower).__name__, weights_of_output(tower)
        self.identity = native_identity(config, class_name=name, weights_sha256=digest, layer=layer)
        self._config, self._side = tower.config, tower.config.patch_size * tower.config.spatial_merge_size
        self._features = getattr(tower.config, "out_hidden_size", tower.config.hidden_size)  # Qwen2-VL's own name
        self._tower = tower.to(config.torch_device, config.torch_dtype)
        self._dtype, self._to_range = config.torch_dtype, PIXEL_RANGES[pixel_range]

    def array(self, size: Size) -> SampleLayout:
        refuse_cropping(size.height, size.width, self._side)
        return layout_of_tokens((size.height // self._side) * (size.width // self._side), self._features)

    @torch.inference_mode()
    def encode(self, pixels_NTYX3: Tensor) -> Tensor:
        pixels_N3YX = still_in_range(pixels_NTYX3, self._to_range, self.device)
        number, _, height, width = pixels_N3YX.shape
        patch = self._config.patch_size
        grids_N3 = torch.tensor([[1, height // patch, width // patch]] * number, device=self.device)
        made = self._tower(self._patches(pixels_N3YX).to(self._dtype), grid_thw=grids_N3)
        tokens: Tensor = made.pooler_output if self._level is None else made.deepstack_features[self._level]
        return tokens.view(number, -1, tokens.shape[-1]).float()

    def _patches(self, pixels_N3YX: Tensor) -> Tensor:
        """Cut images into squares of patches, as transformers' `Qwen2VLImageProcessor.patchify`, each twice in time."""
        patch, square, frames = (
            getattr(self._config, name) for name in ("patch_size", "spatial_merge_size", "temporal_patch_size")
        )
        number, colours, height, width = pixels_N3YX.shape
        cut = (height // patch // square, square, patch, width // patch // square, square, patch)
        squares_N3GSPGSP = pixels_N3YX.reshape(number, colours, *cut)
        squares_NGGSS3PP = squares_N3GSPGSP.permute(0, 2, 5, 3, 6, 1, 4, 7)
        filmed = squares_NGGSS3PP.unsqueeze(6).expand(*[-1] * 6, frames, -1, -1)
        return filmed.reshape(-1, colours * frames * patch**2)


def level_of(files: ModelFiles, config: Any, layer: int) -> int:
    """Return the deepstack level after the block that `encoder.layer` names."""
    blocks = list(getattr(config, "deepstack_visual_indexes", ()))
    if layer not in blocks:
        levels = f"has deepstack features of the layers {blocks}" if blocks else "has no deepstack features"
        raise ModelError(f"encoder.layer is {layer}, but {files.model} {levels}; leave it out for its merger's tokens")
    return blocks.index(layer)
