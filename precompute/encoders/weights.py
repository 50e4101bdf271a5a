"""Weights of a part of a model, read from safetensors alone, and the SHA-256 that identifies a frozen encoder.

Of a checkpoint's files, only those that hold such weights are read. The SHA-256 covers only what encoding depends on:
named config values, and the encode path's weights as float32, by name. So it stays when a decoder is finetuned, when
float32 weights that bfloat16 holds exactly are saved as such, when a checkpoint is split into shards, and when
diffusers adds a config key with a default.
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
from precompute.encoders.config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, model_file, one_line, quiet

Naming = Callable[[str], str | None]
"""From the name of a weight in the checkpoint to that within the part; None for one that is not the part's."""


UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError),
    *(SafetensorError, StrictDataclassError),
)
"""What json, safetensors and the builders of models raise for absent or cut weights and for senseless configs."""

INDEX = ".index.json"
"""How the name of the file ends that says which file holds which weight."""


@contextmanager
def loading(files: ModelFiles) -> Iterator[None]:
    """Around the reading of a model: what libraries raise becomes a ModelError that names it."""
    try:
        yield
    except UNREADABLE as error:
        raise ModelError(f"encoder.model {files.model} cannot be loaded: {one_line(error)}") from error


@contextmanager
def silence() -> Iterator[None]:
    """Silence transformers' warnings and its bar over weights."""
    from transformers.utils import logging  # which VAEs do without

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet(logging):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_weights(files: ModelFiles, names: tuple[str, str], name_within: Naming) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the part, by its name within that; one of `names` is an index, the other the file of all."""
    for path in weight_files(files, names, name_within):
        with opened(path) as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                if within := name_within(name):
                    yield within, weights.get_tensor(name)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of weights; ModelError where its header does not say where they lie in it."""
    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short; fetch it again (safetensors: {one_line(error)})") from error
    with file:
        yield file


def refuse_damaged(files: ModelFiles, names: tuple[str, str]) -> None:
    """ModelError where a library that reads the whole model would find a file damaged, or none."""
    for path in weight_files(files, names, lambda name: name):
        with opened(path):
            pass


def weight_files(files: ModelFiles, names: tuple[str, str], name_within: Naming) -> list[Path]:
    """The files that hold weights of the part, downloaded if need be; the first of `names` that is there says which."""
    folder = PurePosixPath(files.subfolder)
    first = model_file(files.model, *(str(folder / name) for name in names))
    if first is None:
        raise ModelError(f"encoder.model {files.model} has neither {' nor '.join(names)}, and nothing else is read")
    if not first.name.endswith(INDEX):
        return [first]
    shards: dict[str, str] = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
    needed = (str(folder / shard) for shard in sorted({shard for name, shard in shards.items() if name_within(name)}))
    return [model_file(files.model, shard) or Path(files.model, shard) for shard in needed]


def weights_sha256(
    class_name: str, config: Mapping[str, Any], config_keys: Sequence[str], weights: Iterable[tuple[str, Tensor]]
) -> str:
    """Hash the chosen config values and every tensor: a line of canonical JSON that announces it, then its bytes."""
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
    """Name an encoder that its library runs as it is, and that has neither a posterior nor a normalisation."""
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
