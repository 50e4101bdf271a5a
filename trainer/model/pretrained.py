"""Find pretrained models by hub id or folder, and explain why one cannot be loaded."""

from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: whichever its HTTP library has
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError

from cache_store.errors import ConfigError, ModelError

UNREADABLE_MODEL = (
    *(OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError),
    *(SafetensorError, StrictDataclassError, HTTPError),
)
"""Exceptions that transformers raises or passes on if a model's files are broken."""


CONFIG = "config.json"
"""The file that every model has."""

HUB_TIMEOUT_S = 10

WITHOUT_THE_HUB = (
    "download it where there is a network and name its folder, or copy the Hub's cache and set HF_HUB_OFFLINE=1"
)


def pretrained_name(name: str) -> str:
    """Return the hub id or folder for transformers to load; ConfigError if it can only be a folder, and is none."""
    path = Path(name).expanduser()
    can_be_hub_id = not name.startswith((".", "/", "~")) and name.count("/") <= 1
    if not path.is_dir() and (path.exists() or not can_be_hub_id):
        raise ConfigError(f"model.language_model: no folder {name}")
    return str(path) if name.startswith("~") else name


def refuse_unreachable(name: str) -> None:
    """Raise ModelError if a hub id is not in the local cache and the Hub cannot be reached."""
    try:
        if Path(name).is_dir() or is_offline_mode() or isinstance(try_to_load_from_cache(name, CONFIG), str):
            return
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):  # transformers says what the Hub answered
        return
    except (HTTPError, OSError) as error:
        raise ModelError(
            "is not a folder here and not in the Hub's local cache, and the Hub cannot be reached "
            f"({first_line(error)}); {WITHOUT_THE_HUB}"
        ) from None


def explain_unreadable(error: Exception) -> str:
    """Return transformers' message; if the Hub was not reached, add how to work offline."""
    if not isinstance(error.__cause__, LocalEntryNotFoundError):
        return first_line(error)
    return f"{first_line(error).rstrip('.')}; {WITHOUT_THE_HUB}"


TERSE = (KeyError, AttributeError, MemoryError)


def first_line(error: Exception) -> str:
    """Return the first line of a message, and the next after a colon; with the error's name if it says too little."""
    line, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = f"{line} {more[0]}" if line.endswith(":") and more else line
    return f"{type(error).__name__} {line}".strip() if isinstance(error, TERSE) else line
