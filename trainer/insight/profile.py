"""The command `profile`: where the time and the memory of a training step go.

With frozen encoders in the step in place of a cache, the same report shows what caching saves. The encoders read images
from the sources that the caches were built from.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache_store import Cache, JoinedCache
from cache_store.cache.entry_points import EncodeImages, find_source_images, open_image_encoder
from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.format.array import ArraySpec
from cache_store.format.tables import CLIP_START
from cache_store.program.output_file import refuse_inside
from cache_store.storage.publish import make_folder
from trainer.config import TrainConfig
from trainer.data.prefetch import Samples
from trainer.data.stream import LatentSource
from trainer.insight.profile_report import markdown_summary, write_profile
from trainer.insight.profile_steps import TRACE_FILE, Profile, profile_steps
from trainer.model.phases import phase
from trainer.model.towers import encoder_model
from trainer.run.inputs import open_inputs
from trainer.run.memory import fit_memory
from trainer.run.parallel import World
from trainer.run.session import open_session

PLANNED = ("uri", "place", CLIP_START)
"""Columns that a reader of sources needs, as far as the plan has them."""

MOST_STEPS = 1_000
"""No viewer opens the trace of more."""


class LiveEncoder:
    """Encodes samples from their images, as the caches hold them."""

    def __init__(self, cache: JoinedCache, device: torch.device) -> None:
        self._cache = cache
        try:
            self._images = {name: find_source_images(each.store) for name, each in cache.caches.items()}
            self._encoders = {name: open_encoder(each, device) for name, each in cache.caches.items()}
        except EncodeOnceError as error:
            raise type(error)(f"--live-encoder: {error}") from None

    def read(self, numbers: np.ndarray) -> Samples:
        columns = [name for name in PLANNED if name in self._cache.columns]
        planned, arrays = self._cache.samples(numbers, columns).to_pylist(), self._cache.arrays_of(numbers)
        return {name: self._encode(name, planned, arrays[name]) for name in self._encoders}

    def _encode(self, name: str, planned: list[dict[str, Any]], array: ArraySpec) -> np.ndarray:
        with phase("image decoding"):
            frames = [self._images[name](each, array)[0] for each in planned]
        with phase("live encoder"):
            return np.stack(self._encoders[name](frames))


def open_encoder(cache: Cache, device: torch.device) -> EncodeImages:
    if (model := encoder_model(cache)) is None:
        raise ConfigError(f"{cache.store} does not record where its encoder is")
    return open_image_encoder(cache.spec.array, model, str(device))


def profile(config: TrainConfig, world: World, steps: int, folder: Path, *, live_encoder: bool) -> Profile:
    """Write the pages and the trace into `folder`, and print times and advice; the run's own folder stays as it is."""
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"steps must be in [1, {MOST_STEPS:,}], got {steps:,}")
    if world.size > 1:
        raise ConfigError("profile runs in one process; unset WORLD_SIZE")
    config.data.refuse_undivided(world.size)
    for cache in config.all_caches:
        refuse_inside("out", folder, cache)
    inputs = open_inputs(replace(config, run=replace(config.run, max_steps=None)), world)
    source: LatentSource | None = LiveEncoder(inputs.cache, world.device) if live_encoder else None
    session = fit_memory(open_session(inputs, source))
    make_folder(folder)
    measured = profile_steps(session, steps, folder, live_encoder=live_encoder)
    write_profile(measured, folder, str(folder))
    print(markdown_summary(measured), f"profile: {folder / 'profile.md'}, profile.html and {TRACE_FILE}", sep="\n")
    return measured
