"""The projector of a run, wherever it lies: for whoever uses it."""

from pathlib import Path
from typing import Any

import yaml

from cache_store.errors import ConfigError, MissingPathError
from trainer.model.projector_file import PROJECTOR_FILE, TrainedProjector
from trainer.run.checkpoint import STATE_FILE, CheckpointFolder, read_state
from trainer.run.folder import CHECKPOINTS, CONFIG_FILE, is_resolved_config


def load_projector(path: str | Path) -> TrainedProjector:
    """Load a trained projector: of a run (its newest checkpoint), of one checkpoint, of an exported folder, or a file.

    Called with samples as a cache gives them, [N, C, H, W] as a tensor, it returns what stands after BOS in the
    language model's `inputs_embeds`: [N, tokens, width], float32. `config` says all else.
    """
    return TrainedProjector(find_projector(Path(path).expanduser()))


def find_projector(path: Path) -> Path:
    """Find the file; ConfigError where there is none, CacheError where its checkpoint is damaged."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise MissingPathError(f"{path} is no folder of a run, and no projector's file")
    newest = CheckpointFolder(path / CHECKPOINTS, keep_last=1).newest()
    folder = newest or path
    if (folder / STATE_FILE).is_file():
        read_state(folder)  # checks every byte
    if not (folder / PROJECTOR_FILE).is_file():
        raise ConfigError(
            f"{path} holds no projector: no {PROJECTOR_FILE} and no checkpoint; run `trainer train` first"
        )
    return folder / PROJECTOR_FILE


def config_of_run(projector_file: Path) -> dict[str, Any] | None:
    """Read the config of the run that a projector lies in, itself or in a checkpoint; None for a file alone."""
    folder = projector_file.parent
    if (folder / STATE_FILE).is_file():
        return read_state(folder).config
    config: dict[str, Any] | None = None
    if is_resolved_config(folder / CONFIG_FILE):
        config = yaml.safe_load((folder / CONFIG_FILE).read_bytes())
    return config


def run_folder(projector_file: Path) -> Path:
    """Return the folder of a run that the projector lies in, if it does in any."""
    folder = projector_file.parent
    return folder.parent.parent if (folder / STATE_FILE).is_file() else folder
