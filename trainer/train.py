"""The command `train`: check the config and the output, then train from the start or from a checkpoint."""

from contextlib import nullcontext

from cache_store.program.output_file import refuse_inside
from cache_store.storage.claim import claim_folder
from trainer.config import WARMUP_STEPS, TrainConfig
from trainer.data.stream import LatentSource
from trainer.insight.captioner import HeldOutCaptions
from trainer.insight.health import Health
from trainer.insight.log import Console, StepLog
from trainer.insight.report import Report
from trainer.insight.startup import announce
from trainer.insight.trackers import refuse_missing
from trainer.model.config import PRETRAINED
from trainer.run.checkpoint import find_checkpoint, refuse_other_run
from trainer.run.folder import checkpoints_of, refuse_foreign_output
from trainer.run.inputs import Inputs, open_inputs
from trainer.run.loop import TrainingLoop
from trainer.run.memory import fit_memory
from trainer.run.observers import Captioner, Observer
from trainer.run.parallel import World
from trainer.run.session import Session, open_session
from trainer.run.trained import initial_projector


def train(config: TrainConfig, world: World, source: LatentSource | None = None) -> None:
    """Train to the last step, or raise Interrupted after a checkpoint; `source` is read in place of the cache."""
    world.on_main(lambda: refuse_impossible(config, world.size))
    with claim_folder(config.run.folder) if world.is_main else nullcontext():
        checkpoints = checkpoints_of(config.run)
        start = find_checkpoint(checkpoints, config.run.resume)
        inputs = open_inputs(config, world)
        if start is not None:
            refuse_other_run(*start, inputs.must_match, config)
        announce_other_vision_tower(inputs)
        session = open_session(inputs, source, start=initial_projector(inputs) if start is None else None)
        announce_large_batch(session)
        session = fit_memory(session)
        loop = TrainingLoop(session, checkpoints, make_captioner(session))
        loop.observers += make_observers(session, loop.total_steps) if world.is_main else []
        announce_warmup(session, loop.total_steps)
        announce(session)
        if start is not None:
            loop.resume(*start)
        loop.run()


def refuse_impossible(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError for a config that no run can have, before anything is read."""
    config.data.refuse_undivided(world_size)
    if config.run.max_steps is not None:  # otherwise the number of steps is known only after tokenising
        config.optim.refuse_endless_warmup(config.run.max_steps)
    refuse_missing(config)
    for cache in config.all_caches:
        refuse_inside("run.output", config.run.folder, cache)
    refuse_foreign_output(config)


def make_observers(session: Session, total_steps: int) -> list[Observer]:
    """Return rank 0's observers: health adds the problems that it finds to a step, and the others show them."""
    return [
        Health(session),
        StepLog(session.config),
        Console(total_steps),
        Report(session, total_steps),
    ]


def make_captioner(session: Session) -> Captioner | None:
    """Return the captioner of held-out samples; None if captions are off or no sample is held out.

    Rank 0 captions alone, unless it cannot run the language model without the others.
    """
    if not session.config.run.sample_captions or not len(session.split.validation):
        return None
    return HeldOutCaptions(session) if session.world.is_main or session.in_step else lambda _: []


def announce_other_vision_tower(inputs: Inputs) -> None:
    """Warn if a checkpoint's own projector reads hidden states that may come from another model's tower."""
    language = inputs.projector_config.language_model.name
    for tower in inputs.projector_config.towers:
        if tower.projector == PRETRAINED and tower.encoder_model != language:
            made_by = tower.encoder_model or "an unknown model"
            inputs.world.warn(
                f"model.towers.{tower.name}: the projector of {language} reads hidden states of its own vision tower "
                f"only, but the cache was made by {made_by}; check that the two towers have equal weights: from "
                "another tower's states the projector makes noise"
            )


def announce_large_batch(session: Session) -> None:
    batch_size = session.config.data.batch_size
    if len(session.split.train) < batch_size:
        session.world.say(f"data.batch_size {batch_size} is larger than the training set: every batch repeats samples")


def announce_warmup(session: Session, total_steps: int) -> None:
    """Print the warm-up if the default was shortened; ConfigError if optim.warmup_steps is too long for the run."""
    optim = session.config.optim
    optim.refuse_endless_warmup(total_steps)
    if optim.warmup_steps is None and (steps := optim.warmup(total_steps)) < WARMUP_STEPS:
        share = f"{steps:,} of {total_steps:,} steps, a tenth of the run" if steps else "none, in a run so short"
        session.world.say(f"warm-up: {share}; optim.warmup_steps sets another number")
