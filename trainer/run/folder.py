"""The folder of a run: never one that holds something else, and what was asked of the run in it."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import yaml

from cache_store.errors import ConfigError
from cache_store.program.output_file import real_path
from cache_store.storage.claim import refuse_foreign_names
from cache_store.storage.publish import write_file
from trainer.config import RunConfig, TrainConfig
from trainer.run.checkpoint import CheckpointFolder

CONFIG_FILE = "config.yaml"


def checkpoints_of(run: RunConfig) -> CheckpointFolder:
    return CheckpointFolder(run.folder / "checkpoints", run.keep_last)


def refuse_other_than_a_run(config: TrainConfig) -> None:
    """ConfigError where the output holds something and is no run of ours, or is to be the text's folder too."""
    if config.data.text_dir and real_path(Path(config.data.text_dir).expanduser()) == real_path(config.run.folder):
        raise ConfigError(f"data.text_dir: {config.data.text_dir} is run.output; name a folder in it, or another")
    if not has_run(config.run):
        refuse_foreign_names(config.run.folder, names_before_the_config(config), "run.output", "run")


def names_before_the_config(config: TrainConfig) -> tuple[str, ...]:
    """What a run that ended before it wrote its config may leave: its text, where that is kept in the output."""
    folder, text_dir = real_path(config.run.folder), real_path(Path(config.data.text_dir or "/").expanduser())
    return text_dir.relative_to(folder).parts[:1] if text_dir.is_relative_to(folder) else ()


def has_run(run: RunConfig) -> bool:
    """A run writes its config first; one that has lost it still has its checkpoints."""
    return is_resolved_config(run.folder / CONFIG_FILE) or bool(checkpoints_of(run).steps())


def is_resolved_config(path: Path) -> bool:
    """By the sections: many programs have a file of that name."""
    sections = re.findall(rb"^(\w+):", path.read_bytes() if path.is_file() else b"", re.MULTILINE)
    return [name.decode() for name in sections] == [field.name for field in fields(TrainConfig)]


def write_config(config: TrainConfig) -> None:
    text = yaml.safe_dump(asdict(config), sort_keys=False)
    write_file(config.run.folder / CONFIG_FILE, text.encode())
