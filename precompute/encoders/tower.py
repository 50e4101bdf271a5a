"""Frozen vision towers as transformers runs them: a hidden state, one token per patch or per square of patches.

Only the tower's weights are read, and files without any are not downloaded. Transformers only warns about missing
weights and leaves them random; here they are an error.
"""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import SampleLayout, Size
from precompute.encoders.encoder import (
    PIXEL_RANGES,
    Encoder,
    PixelRange,
    TowerLocation,
    layout_of_tokens,
    refuse_other_size,
    still_in_range,
)
from precompute.encoders.encoder_config import VISION_CONFIG, EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.weights import (
    NOT_OF_OUTPUT,
    TRANSFORMERS_FILES,
    model_errors,
    native_identity,
    read_model,
    read_weights,
    weights_sha256,
)

# Axes: N images, Y X pixels, T tokens, F features, G squares per side, P patches per side of a square.

TOWER_CPU_PIXELS = 2**19
"""Pixels that a CPU encodes at once: 10 images of 224x224, 1 of 896x896.

On two Zen 5 cores 10 take 7 to 17 % less time with SigLIP base than one by one; the bits are equal. More cost memory.
"""


class TowerEncoder(Encoder):
    def __init__(
        self, files: ModelFiles, location: TowerLocation, config: EncoderConfig, pixel_range: PixelRange
    ) -> None:
        with model_errors(files):
            held = tower_config(files, location)
            tower = read_whole_tower(files, location, held)
            side, patch = (each if isinstance(each, int) else each[0] for each in (held.image_size, held.patch_size))
            tokens, self._features = shape_of_output(files, type(tower), held, side)
            patches = side // patch
            patches, before = (patches, tokens - patches**2) if tokens >= patches**2 else (isqrt(tokens), 0)
            own_pool = patches // isqrt(files.config.get("mm_tokens_per_image", patches**2))
        if before + patches**2 != tokens:
            raise ModelError(
                f"encoder.model {files.model} makes {tokens} tokens of an image, which do not form a square of patches"
            )
        self._layer = layer = one_layer(config, own_layer(files))
        layers = held.num_hidden_layers
        if layer is not None and not -layers - 1 <= layer <= layers:
            raise ModelError(
                f"encoder.layer is {layer}, but {files.model} has hidden states 0 to {layers}, or -1 to {-layers - 1}"
            )
        self._pool = pool = own_pool if config.pool == "auto" else config.pool
        if pool < 1 or patches % pool:
            raise ConfigError(f"encoder.pool must divide the tower's {patches} patches per side, got {pool}")
        class_name = type(tower).__name__
        if config.class_token and not before:
            raise ConfigError(f"encoder.class_token: a {class_name} has none; leave it out")
        if config.class_token and pool > 1:
            raise ConfigError("encoder.class_token cannot stand beside pooled patches; set encoder.pool: 1")
        self._dropped = 0 if config.class_token else before
        """Number of class tokens and registers, before the patches, to leave out."""
        self._side, self._tokens = side, before - self._dropped + (patches // pool) ** 2
        self._to_range, self._dtype, self.device = PIXEL_RANGES[pixel_range], config.torch_dtype, config.torch_device
        self.identity = native_identity(
            config,
            class_name=class_name,
            weights_sha256=weights_of_output(tower),
            pool=pool,
            layer=layer,
            class_token=config.class_token,
        )
        self._tower = tower.to(self.device, self._dtype)

    def array(self, size: Size) -> SampleLayout:
        refuse_other_size(size.height, size.width, self._side)
        return layout_of_tokens(self._tokens, self._features)

    @torch.inference_mode()
    def encode(self, pixels_NTYX3: Tensor) -> Tensor:
        # the number at once depends only on the images' size, so that the bits do not depend on the machine's load
        pixels_N3YX = still_in_range(pixels_NTYX3, self._to_range, self.device)
        at_once = max(1, TOWER_CPU_PIXELS // self._side**2) if self.device.type == "cpu" else len(pixels_N3YX)
        chunks = torch.split(pixels_N3YX.to(self._dtype).contiguous(), at_once)
        return torch.cat([average_squares(self._kept(chunk), self._pool) for chunk in chunks])

    def _kept(self, image_N3YX: Tensor) -> Tensor:
        made = self._tower(pixel_values=image_N3YX, output_hidden_states=self._layer is not None)
        hidden_NTF: Tensor = made.last_hidden_state if self._layer is None else made.hidden_states[self._layer]
        return hidden_NTF[:, self._dropped :].float()


def average_squares(hidden_NTF: Tensor, side: int) -> Tensor:
    """Average `side` x `side` neighbours of a square grid of tokens, as Gemma 3's projector does before its norm."""
    if side == 1:
        return hidden_NTF
    number, tokens, features = hidden_NTF.shape
    across = isqrt(tokens) // side
    squares_NGPGPF = hidden_NTF.reshape(number, across, side, across, side, features)
    return squares_NGPGPF.mean((2, 4)).flatten(1, 2)


COMMON = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size")
ENCODE_CONFIG = {
    "siglip_vision_model": (*COMMON, "patch_size", "hidden_act", "layer_norm_eps"),
    "clip_vision_model": (*COMMON, "patch_size", "hidden_act", "layer_norm_eps"),
}
"""Config values that a tower's output depends on, by model type; for other types, all values."""

UNUSED = ("head.", "pooler.")
"""Prefixes of weights after the last hidden state, such as the head of SigLIP."""


def one_layer(config: EncoderConfig, default: int | None) -> int | None:
    if isinstance(config.layer, list):
        raise ConfigError(f"encoder.layer: {config.layer} is for text encoders; name one layer of a vision tower")
    return default if config.layer == "auto" else config.layer


def own_layer(files: ModelFiles) -> int | None:
    layer = files.config.get("vision_feature_layer", -2 if files.class_name.startswith("Llava") else None)
    if isinstance(layer, list):
        raise ModelError(
            f"encoder.model {files.model} joins the hidden states {layer} of its tower; name one encoder.layer"
        )
    return None if layer is None else int(layer)


def tower_config(files: ModelFiles, location: TowerLocation) -> Any:
    """Make the tower's config, without a head."""
    values = location.tower_values(files.config)
    if not isinstance(values, Mapping):
        raise ModelError(
            f"encoder.model {files.model} has no {VISION_CONFIG} in its config.json: it has no vision tower"
        )
    kind = values.get("model_type", location.kinds[0] if location.kinds else "")
    if kind not in (location.kinds or CONFIG_MAPPING):
        wanted = " or ".join(location.kinds) or "known to transformers"
        raise ModelError(f"encoder.model {files.model} has a vision tower of type {kind}, not {wanted}")
    headless = {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    return CONFIG_MAPPING[kind].from_dict({**values, **headless})


def read_whole_tower(files: ModelFiles, location: TowerLocation, config: Any) -> Any:
    tower_class = class_of_tower(config)
    weights = dict(tower_weights(files, location, tower_class))
    given = {"config": config, "state_dict": weights, "dtype": torch.float32}
    return read_model(files, tower_class, "vision tower", UNUSED, **given)


def class_of_tower(config: Any) -> Any:
    """Find transformers' class for a tower's config; its own table lacks Qwen2-VL's."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    if Qwen2VisionTransformerPretrainedModel.config_class is not type(config):
        raise KeyError(config.model_type)
    return Qwen2VisionTransformerPretrainedModel


def shape_of_output(files: ModelFiles, tower_class: Any, config: Any, side: int) -> tuple[int, int]:
    """Return the number of tokens of an image and of their features, without computing them."""
    with torch.device("meta"), torch.inference_mode():
        made = tower_class(config).eval()(pixel_values=torch.empty(1, config.num_channels, side, side))
    if made.last_hidden_state.dim() != 3:
        raise ModelError(
            f"encoder.model {files.model} makes {tuple(made.last_hidden_state.shape)} of an image, not tokens"
        )
    _, tokens, features = made.last_hidden_state.shape
    return tokens, features


def weights_of_output(tower: Any) -> str:
    kind, values = tower.config.model_type, tower.config.to_dict()
    of_kind = sorted(tower.config.to_diff_dict().keys() - NOT_OF_OUTPUT)
    weights = ((name, each) for name, each in tower.state_dict().items() if not name.startswith(UNUSED))
    return weights_sha256(type(tower).__name__, values, ENCODE_CONFIG.get(kind, of_kind), weights)


def tower_weights(files: ModelFiles, location: TowerLocation, tower_class: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tower's weights in the checkpoint, except a head's, by their names in the tower."""
    prefixes = location.prefixes
    if prefixes is None:
        is_alone = files.class_name == tower_class.__name__
        prefixes = (f"{tower_class.base_model_prefix}.", *([""] if is_alone else []))

    def name_within(name: str) -> str | None:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)

    for name, weight in read_weights(files, TRANSFORMERS_FILES, name_within):
        if not name.startswith(UNUSED) and not name.endswith("position_ids"):  # saved by older versions
            yield name, weight
