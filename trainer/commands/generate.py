"""The command `generate`: what the language model says of images, by a trained projector."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache_store import Cache, open_cache
from cache_store.errors import ConfigError, NoCacheError
from cache_store.program.output_file import refuse_output, write_output
from cache_store.refusal import differing, printable, refuse
from trainer.config import GenerateConfig
from trainer.data.stream import as_tensor
from trainer.generate.generator import Answer, Generator, open_generator
from trainer.generate.rows import CachedSample, chosen_samples
from trainer.model.projector_file import TrainedProjector
from trainer.run.inputs import what_latents_mean
from trainer.run.parallel import local_device
from trainer.run.trained import cache_of_run, load_projector
from trainer.text.chat import Message


def generate(run: str, config: GenerateConfig) -> None:
    """Print what the model says of each image; with `report`, write it as JSON too."""
    projector = load_projector(run)
    cache = open_fitting_cache(projector, config.cache)
    report = Path(config.report).expanduser() if config.report else None
    if report:
        refuse_output("report", report, cache.root)
    samples = chosen_samples(cache, config.rows, config.ids)
    generator = open_generator(projector, config, local_device(0))
    torch.manual_seed(config.seed)
    records = []
    for record in answers(generator, cache, samples, config, projector.config.training.val_fraction):
        print_record(record)
        records.append(record)
    if report:
        said = {"projector": str(projector.path), "steps": projector.config.training.steps, "answers": records}
        write_output(report, json.dumps(said, indent=1, ensure_ascii=False).encode() + b"\n")


def open_fitting_cache(projector: TrainedProjector, named: str | None) -> Cache:
    """Open the cache that is named, or the run's own; StaleError where its latents mean something else."""
    path = named or cache_of_run(projector.path)
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
    return cache


def answers(
    generator: Generator, cache: Cache, samples: list[CachedSample], config: GenerateConfig, val_fraction: float
) -> Iterator[dict[str, Any]]:
    """One record for each sample, in batches."""
    for start in range(0, len(samples), config.batch_size):
        part = samples[start : start + config.batch_size]
        asked = [each.question if config.prompt is None else asked_by_user(config.prompt) for each in part]
        latents = as_tensor(cache.read(np.array([each.number for each in part])))
        for sample, messages, answer in zip(part, asked, generator(latents, asked), strict=True):
            record = {"row": sample.row, "id": sample.id, "held_out": sample.was_held_out(val_fraction)}
            record |= record_of(messages, answer)
            yield record | ({"reference": sample.reference} if config.prompt is None else {})


def asked_by_user(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def record_of(messages: list[Message], answer: Answer) -> dict[str, Any]:
    prompt = "\n".join(each["content"] for each in messages)
    return {"prompt": prompt, "answer": answer.text, "is_whole": answer.is_whole}


def print_record(record: dict[str, Any]) -> None:
    """Print one answer under the name of its image."""
    held_out = ", held out of training" if record["held_out"] else ""
    print(f"row {record['row']}, {printable(record['id'])}{held_out}")
    cut = "" if record["is_whole"] else " […]"
    lines = {"prompt": record["prompt"], "answer": record["answer"] + cut, "reference": record.get("reference")}
    for name, text in lines.items():
        for number, line in enumerate((text or "").splitlines()):
            print(f"  {'' if number else name:<9}  {printable(line)}")
