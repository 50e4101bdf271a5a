"""The command `profile`: where the time and the memory of a training step go."""

from dataclasses import replace
from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.program.output_file import refuse_inside
from cache_store.storage.files import make_folder
from trainer.config import TrainConfig
from trainer.data.batches import LatentSource
from trainer.insight.profiling.live import LiveEncoder
from trainer.insight.profiling.measure import Profile, profile_steps
from trainer.insight.profiling.report import markdown_summary, write_profile
from trainer.run.fit import fitted
from trainer.run.inputs import open_inputs
from trainer.run.parallel import World
from trainer.run.session import open_session

MAX_STEPS = 1_000
"""More make a trace that no viewer opens."""


def profile(config: TrainConfig, world: World, steps: int, folder: Path, *, live_encoder: bool) -> Profile:
    """Write the pages and the trace into `folder`, and print what stands out; the run's own folder stays as it is."""
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"steps must be in [1, {MAX_STEPS:,}], got {steps:,}")
    if world.size > 1:
        raise ConfigError("profile is for one process; unset WORLD_SIZE")
    config.data.refuse_undivided(world.size)
    for cache in config.all_caches:
        refuse_inside("out", folder, cache)
    inputs = open_inputs(replace(config, run=replace(config.run, max_steps=None)), world)
    source: LatentSource | None = LiveEncoder(inputs.cache, world.device) if live_encoder else None
    session = fitted(open_session(inputs, source))
    make_folder(folder)
    measured = profile_steps(session, steps, folder, live_encoder=live_encoder)
    write_profile(measured, folder, str(folder))
    print(markdown_summary(measured), f"profile: {folder / 'profile.md'}, profile.html and trace.json", sep="\n")
    return measured
