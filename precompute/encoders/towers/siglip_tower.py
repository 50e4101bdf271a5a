"""SigLIP's vision tower, by itself, beside its text tower or within Gemma 3: transformers' `SiglipVisionModel`.

Of a checkpoint, only files that hold weights of the tower are downloaded, and only those weights are read, from
safetensors alone. The head that makes one vector of an image is left out, as the last hidden state comes before it.
transformers only warns of weights that a checkpoint lacks and leaves them random; here that is an error.
"""

# Axes: N images, Y X pixels, T tokens, F features.

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.utils import logging

from cache_store.errors import ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.identity import weights_sha256
from precompute.encoders.model_files import ModelFiles, quiet, refuse_partial
from precompute.encoders.towers.tower import FrozenTower
from precompute.encoders.weight_files import loading, read_weights

ENCODE_CONFIG = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_channels",
    "image_size",
    "patch_size",
    "hidden_act",
    "layer_norm_eps",
)

HEAD = "head."

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""As transformers looks for them."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint of some class keeps the tower."""

    config: str | None
    """Key in config.json; None where all of that is the tower's."""
    prefixes: tuple[str, ...]
    """What stands before the names of its weights, by the version of transformers that saved them, longest first."""


PLACES = {
    "SiglipVisionModel": Place(None, ("vision_model.", "")),
    "SiglipModel": Place("vision_config", ("vision_model.",)),
    "Gemma3ForConditionalGeneration": Place(
        "vision_config",
        ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower."),
    ),
}
"""By class of the checkpoint."""


def load_siglip(files: ModelFiles, config: EncoderConfig) -> FrozenTower:
    """The frozen vision tower of the checkpoint in `files`; ModelError when anything of it is wrong."""
    with loading(files):
        tower = read_whole_tower(files, tower_config(files))
        patches = tower.config.image_size // tower.config.patch_size
        pool = patches // isqrt(files.config.get("mm_tokens_per_image", patches**2))
    values = tower.config.to_dict()
    digest = weights_sha256("SiglipVisionModel", values, ENCODE_CONFIG, tower.state_dict().items())
    tower = tower.to(config.torch_device, config.torch_dtype)

    def hidden(image_N3YX: Tensor) -> Tensor:
        return tower(pixel_values=image_N3YX).last_hidden_state  # type: ignore[no-any-return]

    return FrozenTower(
        hidden=hidden,
        class_name="SiglipVisionModel",
        weights_sha256=digest,
        image_side=tower.config.image_size,
        patches=patches,
        features=tower.config.hidden_size,
        pool=pool,
    )


def tower_config(files: ModelFiles) -> Any:
    """The tower's config, its head left out; ModelError where the checkpoint has a tower of another kind."""
    key = PLACES[files.class_name].config
    values = files.config if key is None else files.config.get(key)
    if not isinstance(values, Mapping):
        raise ModelError(f"encoder.model {files.model} has no {key} in its config.json: it has no vision tower")
    kind = values.get("model_type", SiglipVisionConfig.model_type)
    if kind != SiglipVisionConfig.model_type:
        raise ModelError(f"encoder.model {files.model} has a vision tower of type {kind}, not siglip_vision_model")
    return SiglipVisionConfig.from_dict({**values, "vision_use_head": False})


def read_whole_tower(files: ModelFiles, config: Any) -> Any:
    """The tower in float32, frozen."""
    with silence():
        tower, report = SiglipVisionModel.from_pretrained(
            None,
            config=config,
            state_dict=dict(tower_weights(files)),
            dtype=torch.float32,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below
            output_loading_info=True,
        )
    refuse_partial(files, report, "vision tower", ("",))
    return tower.requires_grad_(False).eval()


def tower_weights(files: ModelFiles) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the tower that the checkpoint holds, under the name that it has within the tower."""
    for name, weight in read_weights(files, WEIGHTS, partial(name_within, files)):
        if not name.startswith(HEAD):
            yield name, weight


def name_within(files: ModelFiles, name: str) -> str | None:
    """The name in the tower of a weight of the checkpoint; None for one that is not the tower's."""
    prefixes = PLACES[files.class_name].prefixes
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)


@contextmanager
def silence() -> Iterator[None]:
    """Silence transformers' warnings and its bar over weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet(logging):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
