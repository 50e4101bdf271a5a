"""Where pretrained models come from, a hub id or a folder, and what to say when nothing is there."""

from pathlib import Path

from cache_store.errors import ModelError


def refuse_missing_folder(name: str) -> None:
    """ModelError for what can only be a folder and is none: a hub id has one slash at most and begins with a name."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ModelError(f"model.language_model: no folder {name}")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
