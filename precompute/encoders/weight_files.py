"""Weights of a part of a model, read from safetensors alone: of the files of a checkpoint, only those that hold any."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cache_store.errors import ModelError
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
