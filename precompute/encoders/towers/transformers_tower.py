"""Vision towers as transformers runs them, wherever a checkpoint keeps one.

Of a checkpoint, only files that hold weights of the tower are downloaded, and only those weights are read, from
safetensors alone. transformers only warns of weights that a checkpoint lacks and leaves them random; here that is an
error.
"""

# Axes: N images, Y X pixels, T tokens, F features.

from collections.abc import Iterator, Mapping
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from cache_store.errors import ConfigError, ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.identity import weights_sha256
from precompute.encoders.model_files import ModelFiles, refuse_partial
from precompute.encoders.towers.place import VISION_CONFIG, Place
from precompute.encoders.towers.tower import FrozenTower
from precompute.encoders.weight_files import loading, read_weights, silence

COMMON = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size")
ENCODE_CONFIG = {
    "siglip_vision_model": (*COMMON, "patch_size", "hidden_act", "layer_norm_eps"),
    "clip_vision_model": (*COMMON, "patch_size", "hidden_act", "layer_norm_eps"),
}
"""Config values that a tower's output depends on, by its model type; of others, all that their config says."""

NOT_OF_OUTPUT = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"})

UNUSED = ("head.", "pooler.")
"""How names begin of weights that come after the last hidden state."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""As transformers looks for them."""


def load_tower(files: ModelFiles, place: Place, config: EncoderConfig) -> FrozenTower:
    """The frozen vision tower of the checkpoint in `files`; ModelError when anything of it is wrong."""
    with loading(files):
        held = tower_config(files, place)
        tower = read_whole_tower(files, place, held)
        side, patch = (each if isinstance(each, int) else each[0] for each in (held.image_size, held.patch_size))
        tokens, features = shape_of_output(files, type(tower), held, side)
        patches = side // patch
        patches, before = (patches, tokens - patches**2) if tokens >= patches**2 else (isqrt(tokens), 0)
        pool = patches // isqrt(files.config.get("mm_tokens_per_image", patches**2))
    if before + patches**2 != tokens:
        raise ModelError(
            f"encoder.model {files.model} makes {tokens} tokens of an image, which are no square of patches"
        )
    digest = weights_of_output(tower)
    layer = one_layer(config, own_layer(files))
    tower = tower.to(config.torch_device, config.torch_dtype)

    def hidden(image_N3YX: Tensor) -> Tensor:
        if layer is None:
            return tower(pixel_values=image_N3YX).last_hidden_state  # type: ignore[no-any-return]
        return tower(pixel_values=image_N3YX, output_hidden_states=True).hidden_states[layer]  # type: ignore[no-any-return]

    layers = held.num_hidden_layers
    if layer is not None and not -layers - 1 <= layer <= layers:
        raise ModelError(
            f"encoder.layer is {layer}, but {files.model} has hidden states 0 to {layers}, or -1 to {-layers - 1}"
        )
    return FrozenTower(
        hidden=hidden,
        class_name=type(tower).__name__,
        weights_sha256=digest,
        image_side=side,
        patches=patches,
        tokens_before=before,
        features=features,
        pool=pool,
        layer=layer,
    )


def one_layer(config: EncoderConfig, default: int | None) -> int | None:
    """Return the layer that `encoder.layer` names, or the model's own; ConfigError for several."""
    if isinstance(config.layer, list):
        raise ConfigError(f"encoder.layer: {config.layer} is for text encoders; of a vision tower, name one")
    return default if config.layer == "auto" else config.layer


def own_layer(files: ModelFiles) -> int | None:
    """The hidden state that the whole model takes of its tower; None for the last one."""
    layer = files.config.get("vision_feature_layer", -2 if files.class_name.startswith("Llava") else None)
    if isinstance(layer, list):
        raise ModelError(
            f"encoder.model {files.model} joins the hidden states {layer} of its tower; name one encoder.layer"
        )
    return None if layer is None else int(layer)


def tower_config(files: ModelFiles, place: Place) -> Any:
    """The tower's config, its head left out; ModelError where the checkpoint has a tower of another kind."""
    values = place.tower_values(files.config)
    if not isinstance(values, Mapping):
        raise ModelError(
            f"encoder.model {files.model} has no {VISION_CONFIG} in its config.json: it has no vision tower"
        )
    kind = values.get("model_type", place.kinds[0] if place.kinds else "")
    if kind not in (place.kinds or CONFIG_MAPPING):
        wanted = " or ".join(place.kinds) or "known to transformers"
        raise ModelError(f"encoder.model {files.model} has a vision tower of type {kind}, not {wanted}")
    headless = {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    return CONFIG_MAPPING[kind].from_dict({**values, **headless})


def read_whole_tower(files: ModelFiles, place: Place, config: Any) -> Any:
    """The tower in float32, frozen."""
    tower_class = class_of_tower(config)
    with silence():
        tower, report = tower_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(tower_weights(files, place, tower_class)),
            dtype=torch.float32,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below
            output_loading_info=True,
        )
    needed = {kind: [key for key in keys if is_used(key)] for kind, keys in report.items() if kind.endswith("_keys")}
    refuse_partial(files, needed, "vision tower", ("",))
    return tower.requires_grad_(False).eval()


def class_of_tower(config: Any) -> Any:
    """Transformers' class by a tower's config; its table lacks Qwen2-VL's."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    if Qwen2VisionTransformerPretrainedModel.config_class is not type(config):
        raise KeyError(config.model_type)
    return Qwen2VisionTransformerPretrainedModel


def is_used(key: Any) -> bool:
    return not (key if isinstance(key, str) else key[0]).startswith(UNUSED)


def shape_of_output(files: ModelFiles, tower_class: Any, config: Any, side: int) -> tuple[int, int]:
    """How many tokens the tower makes of an image, and of how many features: by shapes alone, nothing is computed."""
    with torch.device("meta"), torch.inference_mode():
        made = tower_class(config).eval()(pixel_values=torch.empty(1, config.num_channels, side, side))
    if made.last_hidden_state.dim() != 3:
        raise ModelError(
            f"encoder.model {files.model} makes {tuple(made.last_hidden_state.shape)} of an image, no tokens"
        )
    _, tokens, features = made.last_hidden_state.shape
    return tokens, features


def weights_of_output(tower: Any) -> str:
    """The hash of what the tower's output depends on."""
    kind, values = tower.config.model_type, tower.config.to_dict()
    of_kind = sorted(tower.config.to_diff_dict().keys() - NOT_OF_OUTPUT)
    weights = ((name, each) for name, each in tower.state_dict().items() if is_used(name))
    return weights_sha256(type(tower).__name__, values, ENCODE_CONFIG.get(kind, of_kind), weights)


def tower_weights(files: ModelFiles, place: Place, tower_class: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the tower that the checkpoint holds, under the name that it has within the tower."""
    prefixes = place.prefixes
    if prefixes is None:
        is_alone = files.class_name == tower_class.__name__
        prefixes = (f"{tower_class.base_model_prefix}.", *([""] if is_alone else []))
    for name, weight in read_weights(files, WEIGHTS, partial(name_within, prefixes)):
        if is_used(name) and not name.endswith("position_ids"):  # older versions saved those
            yield name, weight


def name_within(prefixes: tuple[str, ...], name: str) -> str | None:
    """The name in the tower of a weight of the checkpoint; None for one that is not the tower's."""
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
