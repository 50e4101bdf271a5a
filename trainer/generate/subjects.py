"""What the language model is asked about: rows of a cache, or image files."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cache_store import Cache, JoinedCache, open_cache, open_joined
from cache_store.cache.images import open_image_encoder
from cache_store.errors import ConfigError, MissingPathError, ModelError, NoCacheError
from cache_store.program.config import suggest
from cache_store.refusal import differences_between, printable, refuse
from trainer.config import views_of_run
from trainer.data.stream import as_tensor, as_tensors
from trainer.generate.config import GenerateConfig
from trainer.generate.rows import chosen_samples
from trainer.model.config import each_with
from trainer.model.projector_file import Tower, TrainedProjector
from trainer.model.towers import what_samples_mean
from trainer.run.trained import config_of_run
from trainer.text.chat import Message


@dataclass(frozen=True)
class Subject:
    """One image, and what the model is asked about it."""

    title: str
    record: dict[str, Any]
    """What a report says of it."""
    messages: list[Message]
    reference: str | None = None
    """What the cache has for an answer."""


@dataclass(frozen=True)
class Subjects:
    """All of them, and their latents by place."""

    subjects: Sequence[Subject]
    read: Callable[[slice], Mapping[str, Tensor]]
    """Each tower's samples of a part of them, by its name: [N, *shape]."""
    caches: Sequence[Path | str]
    """That they lie in."""


def find_subjects(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    if config.image is not None:
        return image_files(projector, config, config.image)
    return cached_rows(projector, config)


def cached_rows(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    cache = open_fitting_caches(projector, config)
    samples = chosen_samples(cache, config.rows, config.ids)
    subjects = []
    for sample in samples:
        held_out = sample.was_held_out(projector.config.training.val_fraction)
        title = f"row {sample.row}, {printable(sample.id)}{', held out of training' if held_out else ''}"
        record = {"row": sample.row, "id": sample.id, "held_out": held_out}
        own = (sample.question, sample.reference) if config.prompt is None else (asked(config.prompt), None)
        subjects.append(Subject(title, record, *own))
    numbers = np.array([sample.number for sample in samples])

    def read(part: slice) -> Mapping[str, Tensor]:
        return as_tensors(cache.read(numbers[part]))

    return Subjects(subjects, read, [each.root for each in cache.caches.values()])


def asked(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def open_fitting_caches(projector: TrainedProjector, config: GenerateConfig) -> JoinedCache:
    """Open the caches that are named, or the run's own; StaleError where their samples mean something else."""
    named = by_tower(projector, "cache", config.cache, config.caches)
    run = config_of_run(projector.path) or {}
    paths = named or views_of_run(run)[0]
    option = "--cache" if len(projector.names) == 1 else "--caches"
    if not paths:
        raise ConfigError(f"{projector.path} lies in no run, so no cache is known; name one with {option}")
    opened = {}
    for tower in projector.config.towers:
        if tower.name not in paths:
            raise ConfigError(f"caches: name one for the tower {tower.name} too")
        try:
            opened[tower.name] = open_cache(paths[tower.name])
        except NoCacheError as error:
            raise (
                error if named else NoCacheError(f"{error}; it is the one of the run: name it with {option}")
            ) from None
        refuse_other_samples(tower, opened[tower.name], paths[tower.name], option)
    return open_joined(opened)


def refuse_other_samples(tower: Tower, cache: Cache, path: str, option: str) -> None:
    trained, found = (what_samples_mean(array) for array in (tower.array, cache.spec.array))
    if differences := differences_between(trained, found):
        remedy = f"name a cache of the image recipe and encoder that it was trained with, with {option}"
        summary = f"{path} is not what the projector of the tower {tower.name} reads"
        refuse(summary, differences, [remedy], "in the projector", "in the cache")


def by_tower(
    projector: TrainedProjector, option: str, one: str | None, several: Mapping[str, str] | None
) -> dict[str, str]:
    """What is typed for each tower, by its name, of the options --cache and --caches, or of two like them."""
    if one is not None and len(projector.names) > 1:
        named = each_with(f"{option}s", projector.names)
        raise ConfigError(f"{option}: the projector has several towers; name one for each with {named}")
    typed = dict(several or {}) if one is None else {projector.names[0]: one}
    for name in typed:
        if name not in projector.names:
            raise ConfigError(f"{option}s: the projector has no tower {suggest(name, projector.names)}")
    return typed


def image_files(projector: TrainedProjector, config: GenerateConfig, images: str) -> Subjects:
    """Encode them all at once, tower by tower; the encoders are gone before the language model comes."""
    paths = image_paths(images)
    named = by_tower(projector, "encoder", config.encoder, config.encoders)
    is_one = len(projector.names) == 1
    latents = {
        tower.name: encode(tower, paths, named.get(tower.name), is_one=is_one) for tower in projector.config.towers
    }
    subjects = [
        Subject(f"image {printable(str(path))}", {"image": str(path)}, asked(config.prompt or "")) for path in paths
    ]
    return Subjects(subjects, lambda part: {name: each[part] for name, each in latents.items()}, ())


def encode(tower: Tower, paths: Sequence[Path], named: str | None, *, is_one: bool) -> Tensor:
    """Encode images as the tower's cache was: [N, *shape]; the encoder is `named` where it has moved."""
    model = named or tower.encoder_model
    option = "--encoder" if is_one else each_with("encoders", [tower.name])
    of_tower = "" if is_one else f"tower {tower.name}: "
    if model is None:
        raise ConfigError(f"{of_tower}the projector does not know where its encoder is; name it with {option}")
    try:
        encode_images = open_image_encoder(tower.array, model)
    except (MissingPathError, ModelError) as error:
        if named:
            raise
        raise type(error)(f"{of_tower}{error}; name it, where it is now, with {option}") from None
    return as_tensor(encode_images(paths))


def image_paths(text: str) -> list[Path]:
    """Read one path, or several separated by commas; MissingPathError for what is no file."""
    is_one = os.path.isfile(text)  # noqa: PTH113 (a Path would raise where the text is longer than a name may be)
    paths = [Path(each.strip()).expanduser() for each in ([text] if is_one else text.split(","))]
    for path in paths:
        if not path.is_file():
            raise MissingPathError(f"image: there is no file {path}")
    return paths
