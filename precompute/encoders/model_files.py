"""Find a model's encoder, in a local folder or on the Hub: its folder, its class, and its location in a checkpoint.

A pipeline such as Cosmos-Predict2 keeps its VAE in the subfolder `vae`; only that subfolder is downloaded.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]  # HTTPError: whichever its HTTP library has

from cache_store.errors import MissingPathError, ModelError
from cache_store.log import log_info
from cache_store.messages import counted
from precompute.encoders.encoder_config import VISION_CONFIG

SUBFOLDERS = ("vae", "")
"""Subfolders to search, in this order: a pipeline may have a config of its own at its root."""

PIPELINE_FILE = "model_index.json"
"""The file of a pipeline that names its class."""

UNQUANTISED = "quantised checkpoints are not supported; use one in float32, bfloat16 or float16"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    model: str
    """Folder or hub id, as `from_pretrained` takes it."""
    subfolder: str
    class_name: str
    config: Mapping[str, Any]
    """The values of config.json; diffusers and transformers have defaults for missing ones."""


def find_model(model: str, subfolders: Sequence[str] = SUBFOLDERS) -> ModelFiles:
    """Find a model in the first subfolder, of a folder or a hub id, with a config; MissingPathError if none has one."""
    names = {subfolder: str(PurePosixPath(subfolder, "config.json")) for subfolder in subfolders}
    folder = Path(model).expanduser()
    if folder.exists():
        configs = {subfolder: folder / config for subfolder, config in names.items()}
        return first_config(str(folder), {name: path for name, path in configs.items() if path.is_file()}, names)
    try:
        if "/" in model:
            return first_config(model, cached_configs(model, names) or hub_configs(model, names), names)
    except HFValidationError:
        pass
    raise MissingPathError(f"encoder.model {model} is neither a folder here nor a hub id, which is owner/name")


def first_config(model: str, configs: dict[str, Path], names: Mapping[str, str]) -> ModelFiles:
    if not configs:
        raise MissingPathError(f"encoder.model {model} holds no model: it has none of {', '.join(names.values())}")
    subfolder, config = next(iter(configs.items()))
    class_name, values = read_config(config)
    return ModelFiles(model=model, subfolder=subfolder, class_name=class_name, config=values)


def cached_configs(model: str, names: Mapping[str, str]) -> dict[str, Path]:
    configs = {subfolder: try_to_load_from_cache(model, config) for subfolder, config in names.items()}
    return {subfolder: Path(path) for subfolder, path in configs.items() if isinstance(path, str)}


def hub_configs(model: str, names: Mapping[str, str]) -> dict[str, Path]:
    """Download the first of these configs that the Hub has, and its pipeline's file."""
    if not is_offline_mode():
        log_info(f"looking for encoder.model {model} on the Hub")
    for subfolder, config in names.items():
        if path := hub_file(model, config):
            if subfolder:
                hub_file(model, PIPELINE_FILE)
            return {subfolder: path}
    return {}


def hub_file(model: str, name: str) -> Path | None:
    try:
        with silence_library(hub_logging):
            return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"encoder.model {model} is no folder here, its {Path(name).name} is not in the Hub's local cache, and the"
            " Hub cannot be reached"
        ) from error
    except EntryNotFoundError:
        return None
    except (OSError, HTTPError) as error:
        raise ModelError(f"encoder.model {model} cannot be downloaded from the Hub: {one_line(error)}") from error


def model_file(model: str, *names: str) -> Path | None:
    """Find the first of these files in the model's folder, the Hub's local cache, or the Hub."""
    if (path := local_file(model, *names)) or Path(model).is_dir():
        return path
    return next(filter(None, (hub_file(model, name) for name in names)), None)


def local_file(model: str, *names: str) -> Path | None:
    if (folder := Path(model)).is_dir():
        return next((folder / name for name in names if (folder / name).is_file()), None)
    cached = (try_to_load_from_cache(model, name) for name in names)
    return next((Path(path) for path in cached if isinstance(path, str)), None)


def pipeline_class(model: str) -> str:
    above = [f"../{PIPELINE_FILE}"] if Path(model).is_dir() else []
    path = local_file(model, PIPELINE_FILE, *above)
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["_class_name"]) if path else ""
    except (ValueError, LookupError, TypeError):
        return ""


@contextmanager
def silence_library(library: Any) -> Iterator[None]:
    """Silence a library of Hugging Face; our own errors report problems."""
    before = library.get_verbosity()
    library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library.set_verbosity(before)


def read_config(config: Path) -> tuple[str, dict[str, Any]]:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not JSON: {one_line(error)}") from error
    match values:
        case {"_class_name": str(class_name)} | {"architectures": [str(class_name)]}:
            return class_name, values
    raise MissingPathError(f"{config} is not an encoder's config: it names no class in _class_name or architectures")


def refuse_quantised(files: ModelFiles, reads_text: bool) -> None:
    """Raise ModelError for a quantised model; a larger model's quantisation may leave its vision tower alone."""
    if "quantization_config" in files.config and (reads_text or VISION_CONFIG not in files.config):
        raise ModelError(f"encoder.model {files.model} has a quantization_config in its config.json: {UNQUANTISED}")


def refuse_incomplete(
    files: ModelFiles,
    report: Mapping[str, Any],
    path: str,
    prefixes: tuple[str, ...] = ("",),
    unused: tuple[str, ...] = (),
) -> None:
    """Raise ModelError if a loading report lists missing, unknown or mismatched weights of a path."""
    for kind in ("missing", "unexpected", "mismatched"):
        found = (key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"])
        if names := sorted(name for name in found if name.startswith(prefixes) and not name.startswith(unused)):
            raise ModelError(
                f"encoder.model {files.model} has {counted(len(names), f'{kind} key')} in its {path},"
                f" such as {names[0]}; no weight may stay random, so use a complete {files.class_name} checkpoint"
            )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
