"""Read the weights of one part of a model, from safetensors only, and hash a frozen encoder.

The SHA-256 covers what encoding depends on: named config values, and the encode path's weights as float32, by name. So
it does not change when a decoder is finetuned, when weights are saved exactly in another dtype, when a checkpoint is
split into shards, or when diffusers adds a config key with a default.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import rfc8785
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cache_store.errors import ModelError
from cache_store.format.array import EncoderIdentity
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import (
    UNQUANTISED,
    ModelFiles,
    model_file,
    one_line,
    refuse_incomplete,
    silence_library,
)

Naming = Callable[[str], str | None]
"""Maps a weight's name in the checkpoint to its name in the part; None if it is not the part's."""

DIFFUSERS_FILES = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
TRANSFORMERS_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Names of the weight file or its index, in the order in which each library looks for them."""

LOADING_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError),
    *(SafetensorError, StrictDataclassError),
)
"""Errors of json, safetensors and model constructors for missing or cut weights and invalid configs."""

NOT_OF_OUTPUT = frozenset(
    {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
)
"""Config values of transformers that no output depends on."""

NOT_WEIGHTS = "I64"
"""Type of the counters and positions that libraries save beside weights."""

INDEX = ".index.json"


@contextmanager
def model_errors(files: ModelFiles) -> Iterator[None]:
    try:
        yield
    except LOADING_ERRORS as error:
        raise ModelError(f"encoder.model {files.model} cannot be loaded: {one_line(error)}") from error


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' warnings and its progress bar over weights."""
    from transformers.utils import logging  # not needed by VAEs

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with silence_library(logging):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_weights(files: ModelFiles, names: tuple[str, str], name_within: Naming) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(files, names, name_within):
        with open_weights(path) as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                if within := name_within(name):
                    refuse_integers(path, name, weights)
                    yield within, weights.get_tensor(name)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short; fetch it again (safetensors: {one_line(error)})") from error
    with file:
        yield file


def refuse_unusable(files: ModelFiles, names: tuple[str, str]) -> None:
    """Raise ModelError if weights are missing, damaged or quantised, before a library reads the model."""
    for path in weight_files(files, names, lambda name: name):
        with open_weights(path) as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                refuse_integers(path, name, weights)


def refuse_integers(path: Path, name: str, weights: Any) -> None:
    kind: str = weights.get_slice(name).get_dtype()
    if not kind.startswith(("F", "BF")) and kind != NOT_WEIGHTS:
        raise ModelError(f"{path} has {kind} values in {name}, which are no floating-point numbers: {UNQUANTISED}")


def read_model(files: ModelFiles, model_class: Any, part: str, unused: tuple[str, ...] = (), **given: Any) -> Any:
    """Make a part of a model of transformers, frozen; ModelError unless it has all weights, but for unused prefixes."""
    with silence_transformers():
        # mismatched sizes are reported, and refused below
        how = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = model_class.from_pretrained(None, **given, **how)
    refuse_incomplete(files, report, part, unused=unused)
    return model.requires_grad_(False).eval()


def weight_files(files: ModelFiles, names: tuple[str, str], name_within: Naming) -> list[Path]:
    """List the files with weights of the part, downloaded if needed; the first of `names` found decides."""
    folder = PurePosixPath(files.subfolder)
    first = model_file(files.model, *(str(folder / name) for name in names))
    if first is None:
        raise ModelError(f"encoder.model {files.model} has neither {' nor '.join(names)}, the only files that are read")
    if not first.name.endswith(INDEX):
        return [first]
    shards: dict[str, str] = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
    needed = (str(folder / shard) for shard in sorted({shard for name, shard in shards.items() if name_within(name)}))
    return [model_file(files.model, shard) or Path(files.model, shard) for shard in needed]


def weights_sha256(
    class_name: str, config: Mapping[str, Any], config_keys: Sequence[str], weights: Iterable[tuple[str, Tensor]]
) -> str:
    """Hash the chosen config values and every tensor: a line of canonical JSON that names it, then its bytes."""
    chosen = {key: config[key] for key in sorted(config_keys)}
    digest = hashlib.sha256(json_line({"class_name": class_name, "config": chosen}))
    for name, tensor in sorted(weights, key=lambda weight: weight[0]):
        digest.update(json_line({"name": name, "dtype": "float32", "shape": list(tensor.shape)}))
        array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(array.astype("<f4", copy=False).data)  # little-endian, in row-major order
    return digest.hexdigest()


def json_line(value: Any) -> bytes:
    return rfc8785.dumps(value) + b"\n"


def native_identity(config: EncoderConfig, class_name: str, weights_sha256: str, **others: Any) -> EncoderIdentity:
    """Make the identity of an encoder without a posterior and without normalisation, run by its library."""
    return EncoderIdentity(
        class_name=class_name,
        weights_sha256=weights_sha256,
        path="native",
        compiled=False,
        posterior="none",
        compute_dtype=config.compute_dtype,
        batch_size=config.batch_size,
        latents_mean=(),
        latents_std=(),
        **others,
    )
