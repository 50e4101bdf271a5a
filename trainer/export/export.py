"""The command `export`: write a projector, with all that its users need, to a folder and to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # whichever its library has
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.messages import counted
from cache_store.program.output_file import refuse_inside
from cache_store.storage.local import LocalStore
from cache_store.storage.publish import publish_folder
from trainer.config import views_of_run
from trainer.export import standalone
from trainer.export.card import CURVE_FILE, STANDALONE_FILE, draw_curve, is_hub_id, model_card, read_figures
from trainer.model.pretrained import first_line
from trainer.model.projector_file import (
    CONFIG_FILE,
    PROJECTOR_FILE,
    ProjectorConfig,
    Tower,
    TrainedProjector,
    projector_bytes,
)
from trainer.run.load_projector import config_of_run, load_projector, run_folder


def refuse_unpushable(repo: str) -> None:
    """Raise ConfigError if nothing can be pushed to `repo`."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push-to-hub: {first_line(error)}") from None
    if is_offline_mode():
        raise ConfigError("push-to-hub: HF_HUB_OFFLINE is set; unset it where there is a network")
    if get_token() is None:
        raise ConfigError("push-to-hub: nobody is logged in to the Hub here; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repo: str, steps: int, *, private: bool) -> str:
    """Upload the folder to the repository, which is created if it does not exist; return its address."""
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=f"Projector after {steps:,} steps")
    except (HTTPError, OSError) as error:
        raise EncodeOnceError(
            f"{folder} is complete, but was not pushed to {repo}: {first_line(error)}; run `hf upload {repo} {folder}`"
        ) from None
    return str(made)


CARD_FILE = "README.md"


def export(run: str, folder: Path, repo: str | None, *, private: bool) -> None:
    """Write the folder, and push it to `repo` if one is named."""
    projector = load_projector(run)
    config = config_of_run(projector.path)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"folder: {folder} is not empty; name an empty or a new folder")
    # A file may be in the place of the folder, or of a parent.
    LocalStore(folder).refuse_foreign_names((), "folder", "export")
    for caches in views_of_run(config or {}):
        for cache in caches.values():
            refuse_inside("folder", folder, cache)
    if repo is not None:
        refuse_unpushable(repo)
    write_export(projector, folder, config)
    steps = projector.config.training.steps
    print(f"exported {counted(steps, 'step')} of training: {folder}")
    if repo is not None:
        print(f"pushed: {push(folder, repo, steps, private=private)}")


def write_export(projector: TrainedProjector, folder: Path, run: dict[str, Any] | None) -> None:
    """Write the folder as a whole or not at all."""
    config = shareable(projector.config)
    figures = read_figures(run_folder(projector.path), config.training.steps)
    files = {
        PROJECTOR_FILE: projector_bytes(projector, config),
        CONFIG_FILE: config.as_json,
        CARD_FILE: model_card(config, run, figures).encode(),
        STANDALONE_FILE: Path(standalone.__file__).read_bytes(),
    }
    if figures is not None:
        files[CURVE_FILE] = draw_curve(figures)
    with publish_folder(folder) as scratch:
        for name, data in files.items():
            (scratch / name).write_bytes(data)


def shareable(config: ProjectorConfig) -> ProjectorConfig:
    """Remove paths of this machine: a model's folder is reduced to its name, as `./name`."""
    language = config.language_model
    return msgspec.structs.replace(
        config,
        towers=tuple(shareable_tower(tower) for tower in config.towers),
        language_model=msgspec.structs.replace(language, name=shareable_name(language.name)),
    )


def shareable_tower(tower: Tower) -> Tower:
    return msgspec.structs.replace(tower, encoder_model=tower.encoder_model and shareable_name(tower.encoder_model))


def shareable_name(name: str) -> str:
    return name if is_hub_id(name) else f"./{Path(name).name}"
