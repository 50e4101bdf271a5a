"""What the language model is asked about: rows of a cache, or image files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cache_store import JoinedCache, open_cache, open_joined
from cache_store.cache.image_encoder import open_image_encoder
from cache_store.errors import ConfigError, MissingPathError, ModelError, NoCacheError
from cache_store.refusal import differing, printable, refuse
from trainer.config import GenerateConfig
from trainer.data.stream import as_tensor
from trainer.generate.rows import chosen_samples
from trainer.model.projector_file import TrainedProjector
from trainer.run.inputs import what_latents_mean
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
    cache: Path | None
    """That they lie in."""


def find_subjects(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    if config.image is not None:
        return image_files(projector, config, config.image)
    return cached_rows(projector, config)


def cached_rows(projector: TrainedProjector, config: GenerateConfig) -> Subjects:
    cache = open_fitting_cache(projector, config.cache)
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
        return {name: as_tensor(each) for name, each in cache.read(numbers[part]).items()}

    return Subjects(subjects, read, cache.first.root)


def asked(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def open_fitting_cache(projector: TrainedProjector, named: str | None) -> JoinedCache:
    """Open the cache that is named, or the run's own; StaleError where its latents mean something else."""
    path = named or (config_of_run(projector.path) or {}).get("cache")
    if path is None:
        raise ConfigError(f"{projector.path} lies in no run, so no cache is known; name one with --cache")
    try:
        cache = open_cache(path)
    except NoCacheError as error:
        raise error if named else NoCacheError(f"{error}; it is the one of the run: name it with --cache") from None
    trained, found = (what_latents_mean(array) for array in (projector.config.tower.array, cache.spec.array))
    if differences := differing(trained, found):
        remedy = "name a cache of the image recipe and encoder that it was trained with, with --cache"
        refuse(f"{path} is not what the projector reads", differences, [remedy], "in the projector", "in the cache")
    return open_joined({projector.config.tower.name: cache})


def image_files(projector: TrainedProjector, config: GenerateConfig, images: str) -> Subjects:
    """Encode them all at once; the encoder is gone before the language model comes."""
    paths = image_paths(images)
    tower = projector.config.tower
    model = config.encoder or tower.encoder_model
    if model is None:
        raise ConfigError("the projector does not know where its encoder is; name it with --encoder")
    try:
        encode = open_image_encoder(tower.array, model)
    except (MissingPathError, ModelError) as error:
        raise error if config.encoder else type(error)(f"{error}; name it, where it is now, with --encoder") from None
    latents = as_tensor(encode(paths))
    subjects = [
        Subject(f"image {printable(str(path))}", {"image": str(path)}, asked(config.prompt or "")) for path in paths
    ]
    return Subjects(subjects, lambda part: {tower.name: latents[part]}, None)


def image_paths(text: str) -> list[Path]:
    """Read one path, or several separated by commas; MissingPathError for what is no file."""
    paths = [Path(each.strip()).expanduser() for each in ([text] if Path(text).is_file() else text.split(","))]
    for path in paths:
        if not path.is_file():
            raise MissingPathError(f"image: there is no file {path}")
    return paths
