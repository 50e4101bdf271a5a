"""The command `eval`: measure a checkpoint's validation loss, with own and with shuffled latents."""

import json
from dataclasses import asdict
from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.program.output_file import write_output
from trainer.config import TrainConfig
from trainer.run.checkpoint import (
    VAL_FRACTION,
    CheckpointState,
    is_of_another_cache,
    read_state,
    refuse_other_projector,
)
from trainer.run.folder import checkpoints_of
from trainer.run.inputs import open_inputs
from trainer.run.parallel import World
from trainer.run.session import Session, open_session
from trainer.run.validation import shuffle_test


def evaluate(config: TrainConfig, world: World, checkpoint: Path | None, report: Path | None) -> None:
    """Print the result for `checkpoint`, by default the newest; also write it to `report`, as JSON."""
    checkpoint = checkpoint or checkpoints_of(config.run).newest()
    if checkpoint is None:
        raise ConfigError(f"run.output: {config.run.output} holds no checkpoint; run `trainer train` first")
    state = read_state(checkpoint)
    inputs = open_inputs(config, world)
    refuse_other_projector(checkpoint, state, inputs.must_match)
    session = open_session(inputs, trained=checkpoint)
    announce_other_cache(session, state)
    result = shuffle_test(session)
    if result is not None and world.is_main:
        record = {"checkpoint": str(checkpoint), "step": state.step, **asdict(result)}
        record |= {"difference": result.difference, "verdict": result.verdict}
        print(result, json.dumps(record, allow_nan=False), sep="\n")
        if report:
            write_output(report, json.dumps(record, indent=1).encode() + b"\n")


def announce_other_cache(session: Session, state: CheckpointState) -> None:
    """Say which samples are evaluated where the checkpoint was trained from another cache."""
    if not is_of_another_cache(state, session.must_match):
        return
    here, then = session.config.data.val_fraction, state.must_match[VAL_FRACTION]
    trained_on = "" if here <= float(then) else f"; training held out {then}: ids of both may have been trained on"
    session.world.say(
        f"the checkpoint was trained from another cache: of this one, the {len(session.split.validation):,} samples "
        f"are evaluated that data.val_fraction {here} holds out, by id as in training{trained_on}"
    )
