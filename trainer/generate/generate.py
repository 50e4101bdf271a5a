"""The command `generate`: print the language model's answers about images that a trained projector gives it.

The images are rows of a cache, or files, which are encoded now; either way each subject holds its own samples.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cache_store import JoinedCache, open_cache, open_joined
from cache_store.cache.entry_points import open_image_encoder
from cache_store.errors import ConfigError, MissingPathError, ModelError, NoCacheError
from cache_store.messages import differences_between, printable, refuse
from cache_store.program.config_file import suggest
from cache_store.program.output_file import refuse_inside, refuse_output
from cache_store.storage.local import write_file
from cache_store.storage.store import local_path
from trainer.config import views_of_run
from trainer.data.draws import as_tensor
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import answers, cached_subjects, find_language_model, open_generator
from trainer.model.model_config import spell_option
from trainer.model.projector_file import TrainedProjector
from trainer.model.towers import describe_samples
from trainer.run.figures import Subject
from trainer.run.load_projector import config_of_run, load_projector
from trainer.run.parallel import local_device
from trainer.text.store import held_out, id_hash


def generate(run: str, config: GenerateConfig) -> None:
    """Print an answer for each image; with `report`, write them as JSON too."""
    projector = load_projector(run)
    report = local_path("report", config.report) if config.report else None
    if report:
        refuse_output("report", report, projector.path)
    language_model = find_language_model(projector, config.language_model)
    if config.image is not None:
        subjects = [*image_subjects(projector, config, image_paths(config.image))]
    else:
        cache = open_fitting_caches(projector, config)
        if report:
            for each in cache.caches.values():
                refuse_inside("report", report, each.root)
        subjects = [*row_subjects(projector, config, cache)]
    generator = open_generator(projector, language_model, config, local_device(0))
    torch.manual_seed(config.seed)
    records = []
    for answered in answers(generator, subjects, config.batch_size):
        print(*answered.lines(), sep="\n")
        records.append(answered.record)
    if report:
        content = {"projector": str(projector.path), "steps": projector.config.training.steps, "answers": records}
        write_file(report, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def row_subjects(projector: TrainedProjector, config: GenerateConfig, cache: JoinedCache) -> Iterator[Subject]:
    share = projector.config.training.val_fraction
    for each in cached_subjects(cache, chosen_numbers(config, cache), cache):
        is_held_out = bool(held_out(np.array(id_hash(each.image["id"]), np.uint64), share))
        title, image = f"{each.title}{', held out of training' * is_held_out}", each.image | {"held_out": is_held_out}
        asked = each if config.prompt is None else replace(each, messages=config.user_turn, reference=None)
        yield replace(asked, title=title, image=image)


def chosen_numbers(config: GenerateConfig, cache: JoinedCache) -> np.ndarray:
    """Return the sample numbers of the rows or ids that are asked for, in their order; of equal ids, the first."""
    if config.rows is not None:
        return sample_numbers(cache, row_numbers(config.rows, cache.first.spec.rows))
    ids = (config.ids or "").split(",")
    numbers = cache.where(f"id in {ids!r}")[::-1]
    found = dict(zip(cache.samples(numbers, ["id"])["id"].to_pylist(), numbers.tolist(), strict=True))
    if missing := [name for name in ids if name not in found]:
        raise ConfigError(f"ids: {cache.first.store} has no sample {', '.join(map(repr, missing))}")
    return np.array([found[name] for name in ids])


def row_numbers(text: str, count: int) -> list[int]:
    for word in map(str.strip, text.split(",")):
        if not word.isdecimal():
            raise ConfigError(f"rows must be whole numbers separated by commas, such as 7,3; got {word!r}")
        if int(word) >= count:
            raise ConfigError(f"rows: the cache has rows [0, {count:,}), and no row {int(word):,}")
    return [*map(int, text.split(","))]


def sample_numbers(cache: JoinedCache, rows: Sequence[int]) -> np.ndarray:
    """Find the sample number of each row; ConfigError, with the reason, for a row that a cache has rejected."""
    rejected = cache.rejected_rows()
    for row in filter(rejected.__contains__, rows):
        lacking = next(each for each in cache.caches.values() if row in each.rejected_rows())
        shard = lacking.spec.shard_of_row(row)
        reason = lacking.shards.table(shard, ["reason"])["reason"][row - lacking.spec.shard_rows(shard).start]
        raise ConfigError(f"row {row:,} of {lacking.store} was rejected ({reason}), so the cache holds no sample of it")
    return np.array(rows, np.int64) - np.searchsorted(rejected, rows)


def image_subjects(projector: TrainedProjector, config: GenerateConfig, paths: Sequence[Path]) -> Iterator[Subject]:
    """Encode all files tower by tower, so that an encoder is freed before the next model is loaded; yield them."""
    named, encoded = options_by_tower(projector, "encoder", config), dict[str, list[Tensor]]()
    for tower in projector.config.towers:
        model = named.get(tower.name) or tower.encoder_model
        option = "--encoder" if len(projector.names) == 1 else spell_option("encoders", [tower.name])
        if model is None:
            raise ConfigError(f"the projector does not know the place of {tower.name}'s encoder; name it with {option}")
        try:
            encode_images = open_image_encoder(tower.array, model)
        except (MissingPathError, ModelError) as error:
            if tower.name in named:
                raise
            raise type(error)(f"{error}; if it has moved, name its new place with {option}") from None
        encoded[tower.name] = [*map(as_tensor, encode_images(paths))]
        del encode_images  # holds the encoder
    for place, path in enumerate(paths):
        samples = {name: each[place] for name, each in encoded.items()}
        yield Subject(f"image {printable(str(path))}", {"image": str(path)}, config.user_turn, None, samples)


def image_paths(text: str) -> list[Path]:
    paths = [Path(each.strip()).expanduser() for each in text.split(",")]
    for path in paths:
        if not path.is_file():
            raise MissingPathError(f"image: there is no file {path}")
    return paths


def open_fitting_caches(projector: TrainedProjector, config: GenerateConfig) -> JoinedCache:
    """Open the caches that are named, or the run's own; StaleError if their samples mean something else."""
    named = options_by_tower(projector, "cache", config)
    paths = named or views_of_run(config_of_run(projector.path) or {})[0]
    option, opened = "--cache" if len(projector.names) == 1 else "--caches", {}
    if not paths:
        raise ConfigError(
            f"{projector.path} is not in a run's folder, so its cache is not known; name one with {option}"
        )
    for tower in projector.config.towers:
        if (path := paths.get(tower.name)) is None:
            raise ConfigError(f"caches: name one for the tower {tower.name} too")
        try:
            opened[tower.name] = cache = open_cache(path)
        except NoCacheError as error:
            hint = "" if named else f"; this is the run's own cache; if it has moved, name it with {option}"
            raise NoCacheError(f"{error}{hint}") from None
        trained = describe_samples(tower.array, tower.shapes)
        found = describe_samples(cache.spec.array, [each.shape for each in cache.arrays])
        if differences := differences_between(trained, found):
            remedy = f"name a cache of the image recipe and encoder that it was trained with, with {option}"
            summary = f"{path} is not what the projector of the tower {tower.name} reads"
            refuse(summary, differences, [remedy], "in the projector", "in the cache")
    return open_joined(opened)


def options_by_tower(projector: TrainedProjector, option: str, config: GenerateConfig) -> dict[str, str]:
    """Return the value of each tower, by its name, from a pair of options such as --cache and --caches."""
    one, several = getattr(config, option), getattr(config, f"{option}s")
    if one is not None and len(projector.names) > 1:
        named = spell_option(f"{option}s", projector.names)
        raise ConfigError(f"{option}: the projector has several towers; name one for each with {named}")
    typed = dict(several or {}) if one is None else {projector.names[0]: one}
    for name in typed:
        if name not in projector.names:
            raise ConfigError(f"{option}s: the projector has no tower {suggest(name, projector.names)}")
    return typed
