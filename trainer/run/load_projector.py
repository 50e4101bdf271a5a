"""Finding and loading a trained projector: in a run, a checkpoint, an exported folder or a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cache_store.errors import ConfigError, EncodeOnceError, MissingPathError
from cache_store.messages import differences_between, refuse
from trainer.model.model_config import PRETRAINED
from trainer.model.projector_file import PROJECTOR_FILE, ProjectorConfig, TrainedProjector
from trainer.model.towers import describe_by_tower, describe_form, describe_tower_samples
from trainer.run.checkpoint import LANGUAGE_MODEL, STATE_FILE, CheckpointFolder, read_state
from trainer.run.folder import CHECKPOINTS, CONFIG_FILE, is_resolved_config
from trainer.run.session import Session


def load_projector(path: str | Path) -> TrainedProjector:
    """Load a trained projector from a run (its newest checkpoint), a checkpoint, an exported folder or a file.

    Call the result with samples as a cache gives them, [N, C, H, W], or of several towers with a mapping of their names
    to such tensors. It returns the embeddings that follow BOS in the language model's `inputs_embeds`: [N, tokens,
    width], float32. Its `config` describes the rest.
    """
    return TrainedProjector(find_projector(Path(path).expanduser()))


def initial_projector(session: Session) -> TrainedProjector | None:
    """Load what `model.init_projector` names; StaleError if it reads other latents, or is for another model."""
    name = session.config.model.init_projector
    if name is None:
        return None
    try:
        projector = load_projector(name)
    except EncodeOnceError as error:
        raise type(error)(f"model.init_projector: {error}") from None
    refuse_unfit(session, projector, name)
    announce_start(session, projector)
    return projector


def refuse_unfit(session: Session, projector: TrainedProjector, name: str) -> None:
    refuse_missing_towers(session, projector, name)
    trained, here = (projector_facts(each, projector.names) for each in (projector.config, session.projector_config))
    if differences := differences_between(trained, here):
        remedies = ["set these fields as in its training, or start from another projector"]
        refuse(f"model.init_projector {name} does not fit", differences, remedies, "in the projector", "in this run")


def refuse_missing_towers(session: Session, projector: TrainedProjector, name: str) -> None:
    for tower in projector.names:
        if tower not in session.projectors.names:
            raise ConfigError(f"model.init_projector {name} has the tower {tower}; this run has no tower of that name")
    for tower in session.projectors.names:
        form = session.config.model.form(tower)
        if tower not in projector.names and not form.trained and form.projector != PRETRAINED:
            raise ConfigError(f"model.init_projector {name} has no tower {tower}, which model.towers freezes")


def projector_facts(config: ProjectorConfig, towers: Sequence[str]) -> dict[str, str]:
    described = [tower for tower in config.towers if tower.name in towers]
    # START and END may start from the checkpoint's embeddings, and a tower may be frozen or trained.
    compared = [msgspec.structs.replace(tower, ends_from="learned", trained=True) for tower in described]
    facts = describe_by_tower(compared, describe_tower_samples) | describe_by_tower(compared, describe_form)
    return {**facts, LANGUAGE_MODEL: config.language_model.identity}


def announce_start(session: Session, projector: TrainedProjector) -> None:
    training, here = projector.config.training, session.config.data.val_fraction
    seen = f"; it held out {training.val_fraction:g}: samples held out here may be among its training samples"
    session.world.say(
        f"projector: starts from {projector.path}, {training.steps:,} steps of training"
        f"{seen if here > training.val_fraction else ''}"
    )
    if new := [name for name in session.projectors.names if name not in projector.names]:
        session.world.say(f"projector: has no tower {', '.join(new)}, which starts with new weights")


def find_projector(path: Path) -> Path:
    """Find the projector's file; ConfigError if there is none, CacheError if its checkpoint is damaged."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise MissingPathError(f"{path} is not a run's folder and not a projector file")
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
    folder = projector_file.parent
    if (folder / STATE_FILE).is_file():
        return read_state(folder).config
    config: dict[str, Any] | None = None
    if is_resolved_config(folder / CONFIG_FILE):
        config = yaml.safe_load((folder / CONFIG_FILE).read_bytes())
    return config
