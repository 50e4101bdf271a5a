"""Frozen vision towers as transformers runs them: the last hidden state, a token for each patch or square of patches.

Only files that hold weights of the tower are downloaded, and only those weights are read, from safetensors alone.
transformers only warns of weights that a checkpoint lacks and leaves them random; here that is an error.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import SampleLayout
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PIXEL_RANGES, PixelRange, refuse_other_side
from precompute.encoders.model_files import VISION_CONFIG, ModelFiles, Place, refuse_partial
from precompute.encoders.weights import loading, native_identity, read_weights, silence, weights_sha256

# Axes: N images, Y X pixels, T tokens, F features, G squares of a side, P patches of a square's side.


CPU_PIXELS = 2**19
"""Of the images that a CPU encodes at once: 10 of 224x224, 3 of 384x384, 1 of 896x896.

On two Zen 5 cores 10 of 224x224 at once take 7 to 17 % less CPU time with SigLIP base than one at a time, in float32
and in bfloat16; the tokens' bits are equal. More at once cost memory alone.
"""


@dataclass(frozen=True, kw_only=True)
class FrozenTower:
    """A vision tower on its device, in its compute dtype, and what a cache must know of it."""

    hidden: Callable[[Tensor], Tensor]
    """[N, 3, Y, X] to a hidden state, [N, T, F]: tokens before the patches, then rows of patches from the top."""
    class_name: str
    weights_sha256: str
    image_side: int
    """Pixels; its position embeddings are of this size alone."""
    patches: int
    """Of a side."""
    features: int
    pool: int
    """Patches of a side that its own model averages."""
    tokens_before: int = 0
    """A class token and registers, as far as it has them."""
    layer: int | None = None
    """The hidden state taken, as transformers counts them; None for the last one, behind any final norm."""


class TowerEncoder:
    """Maps uint8 RGB to tokens, on one device."""

    def __init__(self, tower: FrozenTower, config: EncoderConfig, pixel_range: PixelRange) -> None:
        if pixel_range == "theworld":
            raise ConfigError(f"image.range: {pixel_range} is for VAEs; a {tower.class_name} needs signed")
        self._pool = tower.pool if config.pool == "auto" else config.pool
        if self._pool < 1 or tower.patches % self._pool:
            raise ConfigError(
                f"encoder.pool must divide the tower's {tower.patches} patches of a side, got {self._pool}"
            )
        if config.class_token and not tower.tokens_before:
            raise ConfigError(f"encoder.class_token: a {tower.class_name} has none; leave it out")
        if config.class_token and self._pool > 1:
            raise ConfigError("encoder.class_token: pooled patches have none beside them; set encoder.pool: 1")
        self._dropped = 0 if config.class_token else tower.tokens_before
        self._to_range = PIXEL_RANGES[pixel_range]
        self.device = config.torch_device
        self.identity = native_identity(
            config,
            class_name=tower.class_name,
            weights_sha256=tower.weights_sha256,
            pool=self._pool,
            layer=tower.layer,
            class_token=config.class_token,
        )
        self._tower = tower
        self._dtype = config.torch_dtype

    def layout(self, height: int, width: int) -> SampleLayout:
        """[T, F], with statistics of each feature; ConfigError for a size that the tower has no positions for."""
        refuse_other_side(height, width, self._tower.image_side)
        kept = self._tower.tokens_before - self._dropped
        return SampleLayout(
            axes=("token", "feature"),
            shape=(kept + (self._tower.patches // self._pool) ** 2, self._tower.features),
            feature_axis="feature",
            has_preview=False,
        )

    @torch.inference_mode()
    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, T, F], float32, on the encoder's device.

        A CPU takes a few images of a batch at a time, cut by their size alone, so that the bits do not depend on what
        else the machine does.
        """
        pixels_N3YX = self._to_range(image_NYX3.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float())
        at_once = max(1, CPU_PIXELS // self._tower.image_side**2) if self.device.type == "cpu" else len(pixels_N3YX)
        chunks = torch.split(pixels_N3YX.to(self._dtype).contiguous(), at_once)
        return torch.cat([average_squares(self._kept(chunk), self._pool) for chunk in chunks])

    def _kept(self, image_N3YX: Tensor) -> Tensor:
        return self._tower.hidden(image_N3YX)[:, self._dropped :].float()


def average_squares(hidden_NTF: Tensor, side: int) -> Tensor:
    """Average `side` x `side` neighbours of a square grid of tokens, as Gemma 3's projector does before its norm."""
    if side == 1:
        return hidden_NTF
    number, tokens, features = hidden_NTF.shape
    across = isqrt(tokens) // side
    squares_NGPGPF = hidden_NTF.reshape(number, across, side, across, side, features)
    return squares_NGPGPF.mean((2, 4)).flatten(1, 2)


# Axes: N images, Y X pixels, T tokens, F features.


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
