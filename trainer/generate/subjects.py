"""The subjects that the language model is asked about: rows of a cache, or image files."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_store import Cache, JoinedCache, open_cache, open_joined
from cache_store.cache.entry_points import open_image_encoder
from cache_store.errors import ConfigError, MissingPathError, ModelError, NoCacheError
from cache_store.messages import differences_between, printable, refuse
from cache_store.program.config_file import suggest
from trainer.config import views_of_run
from trainer.data.buckets import sizes_of
from trainer.data.stream import as_tensor, as_tensors
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.rows import chosen_samples
from trainer.model.model_config import spell_option
from trainer.model.projector_file import Tower, TrainedProjector
from trainer.model.towers import describe_samples
from trainer.run.load_projector import config_of_run
from trainer.text.chat import Message


@dataclass(frozen=True)
class Subject:
    """One image, and what the model is asked about it."""

    title: str
    record: dict[str, Any]
    """The fields that identify it in a report."""
    messages: list[Message]
    reference: str | None = None
    """The cache's own answer; None if it has none."""


@dataclass(frozen=True)
class Subjects:
    """All subjects, and a function that reads their latents."""

    subjects: Sequence[Subject]
    read: Callable[[slice], Mapping[str, Tensor]]
    """Reads a slice of the subjects: each tower's samples [N, *shape], by its name."""
    caches: Sequence[Path | str]
    """The caches that hold them; empty for image files."""
    sizes_N: np.ndarray
    """Index of the size of each one's latents; those of one size are read together."""


def find_subjects(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    if config.image is not None:
        return subjects_of_images(projector, config, config.image)
    return subjects_of_rows(projector, config)


def subjects_of_rows(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    cache = open_fitting_caches(projector, config)
    samples = chosen_samples(cache, config.rows, config.ids)
    subjects = []
    for sample in samples:
        held_out = sample.is_held_out(projector.config.training.val_fraction)
        title = f"row {sample.row}, {printable(sample.id)}{', held out of training' if held_out else ''}"
        record = {"row": sample.row, "id": sample.id, "held_out": held_out}
        own = (sample.question, sample.reference) if config.prompt is None else (user_turn(config.prompt), None)
        subjects.append(Subject(title, record, *own))
    numbers = np.array([sample.number for sample in samples])

    def read(part: slice) -> Mapping[str, Tensor]:
        return as_tensors(cache.read(numbers[part]))

    return Subjects(subjects, read, [each.root for each in cache.caches.values()], sizes_of(cache).of(numbers))


def user_turn(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def open_fitting_caches(projector: TrainedProjector, config: GenerateConfig) -> JoinedCache:
    """Open the caches that are named, or the run's own; StaleError if their samples mean something else."""
    named = options_by_tower(projector, "cache", config.cache, config.caches)
    run = config_of_run(projector.path) or {}
    paths = named or views_of_run(run)[0]
    option = "--cache" if len(projector.names) == 1 else "--caches"
    if not paths:
        raise ConfigError(
            f"{projector.path} is not in a run's folder, so its cache is not known; name one with {option}"
        )
    opened = {}
    for tower in projector.config.towers:
        if tower.name not in paths:
            raise ConfigError(f"caches: name one for the tower {tower.name} too")
        try:
            opened[tower.name] = open_cache(paths[tower.name])
        except NoCacheError as error:
            raise (
                error
                if named
                else NoCacheError(f"{error}; this is the run's own cache; if it has moved, name it with {option}")
            ) from None
        refuse_other_samples(tower, opened[tower.name], paths[tower.name], option)
    return open_joined(opened)


def refuse_other_samples(tower: Tower, cache: Cache, path: str, option: str) -> None:
    trained = describe_samples(tower.array, tower.shapes)
    found = describe_samples(cache.spec.array, [each.shape for each in cache.arrays])
    if differences := differences_between(trained, found):
        remedy = f"name a cache of the image recipe and encoder that it was trained with, with {option}"
        summary = f"{path} is not what the projector of the tower {tower.name} reads"
        refuse(summary, differences, [remedy], "in the projector", "in the cache")


def options_by_tower(
    projector: TrainedProjector, option: str, one: str | None, several: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the value of each tower, by its name, from a pair of options such as --cache and --caches."""
    if one is not None and len(projector.names) > 1:
        named = spell_option(f"{option}s", projector.names)
        raise ConfigError(f"{option}: the projector has several towers; name one for each with {named}")
    typed = dict(several or {}) if one is None else {projector.names[0]: one}
    for name in typed:
        if name not in projector.names:
            raise ConfigError(f"{option}s: the projector has no tower {suggest(name, projector.names)}")
    return typed


def subjects_of_images(projector: TrainedProjector, config: GenerateConfig, images: str) -> Subjects:
    """Encode all files now, tower by tower, so that the encoders are freed before the language model is loaded."""
    paths = image_paths(images)
    named = options_by_tower(projector, "encoder", config.encoder, config.encoders)
    is_one = len(projector.names) == 1
    latents = {
        tower.name: encode_files(tower, paths, named.get(tower.name), is_one=is_one)
        for tower in projector.config.towers
    }
    subjects = [
        Subject(f"image {printable(str(path))}", {"image": str(path)}, user_turn(config.prompt or "")) for path in paths
    ]
    shapes = list(zip(*([each.shape for each in tower] for tower in latents.values()), strict=True))
    sizes_N = np.unique([str(each) for each in shapes], return_inverse=True)[1]

    def read(part: slice) -> Mapping[str, Tensor]:
        return {name: torch.stack(each[part]) for name, each in latents.items()}

    return Subjects(subjects, read, (), sizes_N)


def encode_files(tower: Tower, paths: Sequence[Path], named: str | None, *, is_one: bool) -> list[Tensor]:
    """Encode images as the tower's cache was: [*shape] each; `named` is the encoder's new place, if it has moved."""
    model = named or tower.encoder_model
    option = "--encoder" if is_one else spell_option("encoders", [tower.name])
    of_tower = "" if is_one else f"tower {tower.name}: "
    if model is None:
        raise ConfigError(f"{of_tower}the projector does not know where its encoder is; name it with {option}")
    try:
        encode_images = open_image_encoder(tower.array, model)
    except (MissingPathError, ModelError) as error:
        if named:
            raise
        raise type(error)(f"{of_tower}{error}; if it has moved, name its new place with {option}") from None
    return [as_tensor(each) for each in encode_images(paths)]


def image_paths(text: str) -> list[Path]:
    """Return one path, or several separated by commas. Raise MissingPathError for one that is not a file."""
    is_one = os.path.isfile(text)  # noqa: PTH113 (a Path would raise an error if the text is longer than a file name may be)
    paths = [Path(each.strip()).expanduser() for each in ([text] if is_one else text.split(","))]
    for path in paths:
        if not path.is_file():
            raise MissingPathError(f"image: there is no file {path}")
    return paths
